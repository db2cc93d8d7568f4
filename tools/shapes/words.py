"""The tokenizer of the built-in model: one token a word, lower case, and one for every word not known.

The vocabulary holds words this model was not trained on (`left`, `moving`, ...) so that a later model, taught
relations and motion, can keep the tokenizer and the text encoder's shape.
"""

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tools.shapes import scenes

MAX_TOKENS = 16  # the pipeline pads with zeros up to here and attends to them: serve with what was trained
SPECIAL = ("<pad>", "</s>", "<unk>")
GLUE = ("a", "on", "the", "of", "and", "with", "in", "background", "picture", "image", "shape", "color")
RESERVED = ("left", "right", "above", "below", "moving", "up", "down", "to", "two", "big", "small", "next")

# How captions are worded in training: mostly the first, the others so that a person's own wording works too.
TEMPLATES = (
    "a {} {} on {}",
    "{} {} on {}",
    "a {} {} on a {} background",
    "a picture of a {} {} on a {} background please",
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """`An Orange star, on grey` and `a orange star on gray` give the same tokens."""
    words = (*SPECIAL, *GLUE, *scenes.COLOURS, *scenes.SHAPES, *scenes.GROUNDS, *RESERVED)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[^\w\s]|_"), " "),
            normalizers.Replace(Regex(r"\ban\b"), "a"),
            normalizers.Replace(Regex(r"\bgrey\b"), "gray"),
            normalizers.Replace(Regex(r"\bcolour"), "color"),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", words.index("</s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=MAX_TOKENS,
        padding_side="right",
    )


class CaptionTable:
    """The tokens of every caption in every wording; the last row is the empty prompt of guidance."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._rows = {caption: row for row, caption in enumerate(scenes.every_caption())}
        words = [(c, s, g) for c in scenes.COLOURS for s in scenes.SHAPES for g in scenes.GROUNDS]
        texts = [template.format(*word) for template in TEMPLATES for word in words] + [""]
        encoded = tokenizer(texts, padding="max_length", max_length=MAX_TOKENS, return_tensors="pt")
        self.tokens: torch.Tensor = encoded.input_ids
        self.mask: torch.Tensor = encoded.attention_mask

    def rows(self, captions: list[str]) -> np.ndarray:
        """The row of each caption in its first wording, (len(captions),) int."""
        return np.array([self._rows[caption] for caption in captions])

    def vary(self, rows: np.ndarray, rng: np.random.Generator, reworded: float, dropped: float) -> np.ndarray:
        """Rows with a share `reworded` in another wording and a share `dropped` made the empty prompt."""
        wording = np.where(rng.random(len(rows)) < reworded, rng.integers(1, len(TEMPLATES), len(rows)), 0)
        varied = rows + wording * len(self._rows)
        return np.where(rng.random(len(rows)) < dropped, len(self.tokens) - 1, varied)
