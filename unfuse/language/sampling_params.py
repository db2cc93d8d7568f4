"""How the next token of a text is sampled, and from what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

#: A temperature below this selects greedy sampling, as in vLLM.
GREEDY = 1e-5


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens are sampled. The defaults sample from the model's distribution, unchanged."""

    #: Divides the logits. 0 means greedy sampling.
    temperature: float = 1.0
    #: Sample among this many likeliest tokens only. 0: among all.
    top_k: int = 0
    #: Sample among the likeliest tokens that have this share of the probability together (nucleus sampling).
    top_p: float = 1.0
    #: Exclude tokens less likely than this share of the likeliest token's probability.
    min_p: float = 0.0
    #: Divides positive and multiplies negative logits of tokens that occur in the prompt or the text.
    repetition_penalty: float = 1.0
    #: Subtracted from a token's logit for each time that it occurs in the text.
    frequency_penalty: float = 0.0
    #: Subtracted from the logits of tokens that occur in the text.
    presence_penalty: float = 0.0
    #: Added to the logits, by token id.
    logit_bias: dict[int, float] = {}
    #: Together with a token's position it determines the random draw.
    seed: int = 0
    #: How many of the likeliest tokens are returned with their logprobs. None: no logprobs at all.
    logprobs: int | None = None
    #: The tokens in `end_ids` are not drawn before this many other tokens.
    min_tokens: int = 0
    #: The token ids that end a text.
    end_ids: tuple[int, ...] = ()
    #: Token sequences that must not occur: their last token is not drawn after the others.
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class NextToken:
    """What a text's next token is sampled from."""

    #: The logits, (vocabulary,).
    logits: Tensor
    #: How it is sampled.
    params: SamplingParams
    #: Its position, which together with the seed determines the draw.
    position: int
    #: The token ids of the prompt.
    prompt_ids: Sequence[int]
    #: The token ids of the text so far.
    output_ids: Sequence[int]
    #: A bit mask by token id; only tokens whose bit is set are drawn. None: all.
    allowed: bytes | None = None
