"""The tokenizer of the built-in model: one token a word, lower case, and one for every word not known."""

from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tools.shapes import scenes

MAX_TOKENS = 16  # the pipeline pads with zeros up to here and attends to them: serve with what was trained
SPECIAL = ("<pad>", "</s>", "<unk>")
GLUE = ("a", "on", "the", "of", "and", "with", "in", "background", "picture", "image", "shape", "color")
PLACES = ("left", "right", "above", "below", "moving", "up", "down", "to", "moves", "over", "under", "towards")
SPARE = ("two", "big", "small", "next")  # in the vocabulary, but in no caption
WORDS = (*GLUE, *scenes.COLOURS, *scenes.SHAPES, *scenes.GROUNDS, *PLACES, *SPARE)
SPELLINGS = ("an", "grey", "colour")  # read as words of these

# How captions are worded in training: mostly the first, the others so that a person's own wording works too.
# A wording that leaves something out also teaches that colour, shape and ground are separate.
SINGLE = (
    "a {0} {1} on {2}",
    "{0} {1} on {2}",
    "a {0} {1} on a {2} background",
    "a picture of a {0} {1} on a {2} background please",
    "a {0} {1}",
    "a {0} shape on {2}",
    "a {1} on {2}",
)
RELATION = (
    "a {0} {1} {2} a {3} {4} on {5}",
    "{0} {1} {2} {3} {4} on {5}",
    "a {0} {1} {6} a {3} {4} on {5}",
    "a picture of a {0} {1} {2} a {3} {4} on a {5} background",
    "a {0} {1} {2} a {3} {4}",
)
MOTION = (
    "a {0} {1} moving {2} on {3}",
    "{0} {1} moving {2} on {3}",
    "a {0} {1} moves {2} on a {3} background",
    "a picture of a {0} {1} moving {2} on a {3} background",
    "a {0} {1} moving {2}",
)
OTHERWISE = {"left of": "to the left of", "right of": "to the right of", "above": "over", "below": "under"}


def wordings(scene: scenes.Scene) -> list[str]:
    """Ways to say what a scene shows, its caption first (but for `an`, which the tokenizer reads as `a`)."""
    thing, *others = scene.things
    words = [thing.colour, thing.shape]
    if others:
        told = [*words, scene.relation, others[0].colour, others[0].shape, scene.ground, OTHERWISE[scene.relation]]
        return [template.format(*told) for template in RELATION]
    if scene.direction:
        return [template.format(*words, scene.direction, scene.ground) for template in MOTION]
    return [template.format(*words, scene.ground) for template in SINGLE]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """`An Orange star, on grey` and `a orange star on gray` give the same tokens."""
    words = (*SPECIAL, *WORDS)
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


class Wordings:
    """The tokens of every wording of some scenes; the last row is the empty prompt of guidance."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, told: Sequence[scenes.Scene]) -> None:
        texts = [wordings(scene) for scene in told]
        self._counts = np.array([len(ways) for ways in texts])
        self._firsts = np.cumsum(self._counts) - self._counts
        self._rows: dict[str, int] = {"": 0}
        flat = [self._rows.setdefault(text, len(self._rows)) for ways in texts for text in ways]
        self._row_of = np.array(flat)
        encoded = tokenizer(list(self._rows), padding="max_length", max_length=MAX_TOKENS, return_tensors="pt")
        self.tokens: torch.Tensor = encoded.input_ids
        self.mask: torch.Tensor = encoded.attention_mask

    def row(self, text: str) -> int:
        """The row of a text that is a wording of one of the scenes, or the empty prompt."""
        return self._rows[text]

    def vary(self, which: np.ndarray, rng: np.random.Generator, reworded: float, dropped: float) -> np.ndarray:
        """A row for each of the scenes `which`: a share `reworded` worded another way, a share `dropped` empty."""
        counts = self._counts[which]
        way = np.where(rng.random(len(which)) < reworded, 1 + rng.integers(0, 1 << 30, len(which)) % (counts - 1), 0)
        rows = self._row_of[self._firsts[which] + way]
        return np.where(rng.random(len(which)) < dropped, self._rows[""], rows)


def things_named(tokens: torch.Tensor) -> torch.Tensor:
    """Which thing each of (B, N) tokens names, 0 or 1 in the order of the caption, and -1 for other words."""
    vocabulary = make_tokenizer().get_vocab()
    named = torch.full_like(tokens, -1)
    for names in (scenes.COLOURS, scenes.SHAPES):
        found = torch.isin(tokens, torch.tensor([vocabulary[name] for name in names]))
        named = torch.where(found, found.cumsum(1) - 1, named)
    return named
