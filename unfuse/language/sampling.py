"""Token sampling: choose the next token from the logits, deterministically.

Every step is exact or in integers, so that equal logits draw equal tokens on every device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from struct import pack, unpack
from typing import TYPE_CHECKING

import msgspec

from unfuse.core.errors import PermanentError
from unfuse.language.sampling_params import GREEDY, NextToken, SamplingParams
from unfuse.language.token_scores import adjusted_scores, allows_none, drawn_tokens, logprob_numbers

if TYPE_CHECKING:
    from torch import Tensor

#: The least logprob that is returned. OpenAI's API uses it for tokens of almost no probability.
UNLIKELY = -9999.0

#: The most bytes of scores of texts that are rows of the same tensors. Up to ten tensors of this size exist at once.
ROWS_BYTES = 64 << 20

#: The same on a CPU, where rows are faster together only as long as they fit into the cache.
CPU_ROWS_BYTES = 128 << 10


class SampledToken(msgspec.Struct, frozen=True):
    """A sampled token, with its logprobs if requested.

    Logprobs are the model's, before bias, penalties and temperature, as in vLLM by default (`raw_logprobs`).
    OpenAI does not document which logprobs its API returns; they do not change with the temperature.
    """

    #: The token id.
    token: int
    #: Its natural-log probability, or None if not requested.
    logprob: float | None = None
    #: (id, logprob) of the likeliest tokens, likeliest first.
    top: tuple[tuple[int, float], ...] = ()


def sample(
    logits: Tensor,
    params: SamplingParams,
    position: int,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    allowed: bytes | None = None,
) -> SampledToken:
    """Return the token to append to a single text, as `sample_all` does. Raises its PermanentError."""
    (sampled,) = sample_all([NextToken(logits, params, position, prompt_ids, output_ids, allowed)])
    if isinstance(sampled, PermanentError):
        raise sampled
    return sampled


def sample_all(texts: Sequence[NextToken]) -> list[SampledToken | PermanentError]:
    """Return the token to append to each text, or its error.

    Bias, penalties, allowed tokens, temperature, top-k, top-p and min-p apply in transformers' order.
    vLLM, too, applies the bias before the penalties. Among equal logits, greedy sampling chooses the lowest id.

    A text gets the same token in every company. Nothing is read from the device but all results together.
    The error of a text says that its largest logit is not finite, or that no known token is allowed.
    """
    tokens: dict[int, SampledToken | PermanentError] = {
        index: PermanentError("the grammar allows only tokens that the model does not have")
        for index, text in enumerate(texts)
        if text.allowed is not None and allows_none(text.allowed, len(text.logits))
    }
    indices = [index for index in range(len(texts)) if index not in tokens]
    groups = _groups(texts, indices) if indices else []
    numbers = [tensor.flatten() for group in groups for tensor in _numbers([texts[index] for index in group])]
    remaining = _read(numbers)
    for group in groups:
        sampled = _sampled_tokens([texts[index].params for index in group], len(texts[group[0]].logits), remaining)
        tokens |= dict(zip(group, sampled, strict=True))
    return [tokens[index] for index in range(len(texts))]


def _groups(texts: Sequence[NextToken], indices: Sequence[int]) -> list[list[int]]:
    """Return the groups of texts that are rows of the same tensors.

    Those of a group are all greedy, or all drawn.
    """
    logits = texts[indices[0]].logits
    most = max(1, (CPU_ROWS_BYTES if logits.device.type == "cpu" else ROWS_BYTES) // (8 * len(logits)))
    kinds = [
        [index for index in indices if (texts[index].params.temperature < GREEDY) is is_greedy]
        for is_greedy in (True, False)
    ]
    return [kind[start : start + most] for kind in kinds for start in range(0, len(kind), most)]


def _numbers(texts: Sequence[NextToken]) -> list[Tensor]:
    """Return the numbers of the texts' sampled tokens as integers.

    First the tokens, (texts,): -1 for logits that are not finite. Then `logprob_numbers` of those with logprobs.
    `texts`: all greedy, or all drawn.
    """
    import torch

    params = [text.params for text in texts]
    logits = texts[0].logits[None] if len(texts) == 1 else torch.stack([text.logits for text in texts])
    scores, is_finite = adjusted_scores(logits, texts, [banned(text.params, text.output_ids) for text in texts])
    if params[0].temperature < GREEDY:
        tokens = scores.argmax(1)
    else:
        tokens = drawn_tokens(scores, params, [chance(text.params.seed, text.position) for text in texts])
    tokens = tokens.where(is_finite, -1)

    counts = [text.logprobs for text in params]
    return [tokens] if counts == [None] * len(counts) else [tokens, logprob_numbers(logits, tokens, counts)]


def _read(numbers: Sequence[Tensor]) -> Iterator[int]:
    """Return the numbers of all tensors, which are read at once."""
    import torch

    return iter(torch.cat([*numbers]).tolist() if numbers else ())


def _sampled_tokens(
    texts: Sequence[SamplingParams], vocabulary: int, numbers: Iterator[int]
) -> list[SampledToken | PermanentError]:
    """Return the sampled tokens, or errors, of the results of `_numbers`."""
    tokens = [*islice(numbers, len(texts))]
    most = min(vocabulary, max((text.logprobs or 0 for text in texts), default=0))
    return [
        _sampled_token(token, text.logprobs, [] if text.logprobs is None else [*islice(numbers, 1 + 2 * most)])
        for token, text in zip(tokens, texts, strict=True)
    ]


def _sampled_token(token: int, count: int | None, numbers: Sequence[int]) -> SampledToken | PermanentError:
    """Return a sampled token, or its error. `numbers`: its row of `logprob_numbers`."""
    if token < 0:
        return PermanentError("the logits of the next token are not finite: the model's weights may be damaged")
    if count is None:
        return SampledToken(token)
    most = len(numbers) // 2
    logprob, *values = (max(UNLIKELY, _float(bits)) for bits in numbers[most:])
    return SampledToken(token, logprob, tuple(zip(numbers[: min(count, most)], values, strict=False)))


def _float(bits: int) -> float:
    """Return the double of these bits."""
    value: float = unpack("<d", pack("<q", bits))[0]
    return value


def banned(params: SamplingParams, output_ids: Sequence[int]) -> set[int]:
    """Return the tokens that must not be drawn next."""
    tokens = {*params.end_ids} if len(output_ids) < params.min_tokens else set[int]()
    for *prefix, last in params.bad_words:
        if not prefix or [*output_ids[-len(prefix) :]] == prefix:
            tokens.add(last)
    return tokens


def chance(seed: int, position: int) -> int:
    """Return a random number of 64 bits, determined by seed and position alone.

    A retry therefore draws the same number, whatever was drawn in between.
    """
    return int.from_bytes(blake2b(f"{seed}:{position}".encode(), digest_size=8).digest())
