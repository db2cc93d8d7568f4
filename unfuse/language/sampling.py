"""Token sampling: choose the next token from the logits, deterministically.

Every step is exact or in integers, so that equal logits draw equal tokens on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec

from unfuse.core.errors import PermanentError

if TYPE_CHECKING:
    from torch import Tensor

#: The weight of the likeliest token. A token more than 2⁴⁰ times less likely has weight 0 and is never drawn.
#: The sum of the weights of any vocabulary fits into 64 bits.
UNIT_WEIGHT = 1 << 40

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

#: Coefficients of the Taylor series of 2ˣ. It is accurate to 2·10⁻¹⁰ for |x| ≤ ½.
SERIES = tuple(accumulate(range(1, 9), lambda term, n: term * LN_2 / n, initial=1.0))

#: A temperature below this selects greedy sampling, as in vLLM.
GREEDY = 1e-5

#: The least logprob that is returned. OpenAI's API uses it for tokens of almost no probability.
UNLIKELY = -9999.0


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
    """Return the token to append at this position of a text.

    Bias, penalties, allowed tokens, temperature, top-k, top-p and min-p apply in transformers' order.
    vLLM, too, applies the bias before the penalties. Among equal logits, greedy sampling chooses the lowest id.

    `logits`: (vocabulary).
    `position`: the token's position, which together with the seed determines the draw.
    `prompt_ids`, `output_ids`: the token ids of the prompt, and of the text generated so far.
    `allowed`: a bit mask by token id; only tokens whose bit is set are drawn. None: all.
    Raises PermanentError if the largest logit is not finite, and if no known token is allowed.
    """
    scores = adjusted(logits, params, prompt_ids, output_ids)
    if not bool(scores.max().isfinite()):
        raise PermanentError("the logits of the next token are not finite: the model's weights may be damaged")

    if allowed is not None:
        scores = scores.masked_fill(~_unpack_mask(allowed, scores), float("-inf"))
    scores = _exclude(scores, banned(params, output_ids))

    if params.temperature < GREEDY:
        token = int(scores.argmax())
    else:
        # The draw is a point below the total weight. The token whose interval contains it is chosen.
        # It is computed with Python's integers, because the product has more than 64 bits.
        sums = weights(scores, params).cumsum(0)
        point = chance(params.seed, position) * int(sums[-1]) >> 64
        token = int((sums <= point).sum())

    if params.logprobs is None:
        return SampledToken(token)
    logprobs = logits.float().log_softmax(0)
    topk = logprobs.topk(min(params.logprobs, len(logprobs)))
    top = tuple(zip(topk.indices.tolist(), topk.values.clamp(min=UNLIKELY).tolist(), strict=True))
    return SampledToken(token, max(UNLIKELY, float(logprobs[token])), top)


def banned(params: SamplingParams, output_ids: Sequence[int]) -> set[int]:
    """Return the tokens that must not be drawn next."""
    tokens = {*params.end_ids} if len(output_ids) < params.min_tokens else set[int]()
    for *prefix, last in params.bad_words:
        if not prefix or [*output_ids[-len(prefix) :]] == prefix:
            tokens.add(last)
    return tokens


def _exclude(scores: Tensor, tokens: set[int]) -> Tensor:
    """Return the scores with -inf for these tokens, so that they are never drawn.

    The scores are unchanged if no other token is left: a grammar takes precedence.
    """
    import torch

    known_ids = [token for token in tokens if token < len(scores)]
    if not known_ids:
        return scores
    other_scores = scores.index_fill(0, torch.tensor(known_ids, device=scores.device), float("-inf"))
    return other_scores if bool(other_scores.max() > float("-inf")) else scores


def _unpack_mask(bits: bytes, scores: Tensor) -> Tensor:
    """Return a boolean tensor in the shape of `scores`: whether each token's bit is set.

    Tokens beyond the bits are false. Raises PermanentError if no token's bit is set.
    """
    import torch

    packed = torch.frombuffer(bytearray(bits), dtype=torch.uint8).to(scores.device)
    bits_set = (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=scores.device) & 1).bool().view(-1)

    mask = torch.zeros_like(scores, dtype=torch.bool)
    length = min(len(bits_set), len(scores))
    mask[:length] = bits_set[:length]
    if not bool(mask.any()):
        raise PermanentError("the grammar allows only tokens that the model does not have")
    return mask


def chance(seed: int, position: int) -> int:
    """Return a random number of 64 bits, determined by seed and position alone.

    A retry therefore draws the same number, whatever was drawn in between.
    """
    return int.from_bytes(blake2b(f"{seed}:{position}".encode(), digest_size=8).digest())


def adjusted(logits: Tensor, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Tensor:
    """Return the logits as float64 with bias and penalties applied, (vocabulary).

    The repetition penalty is the first one, as in vLLM.
    """
    import torch

    scores = logits.double()
    if params.logit_bias:
        biased_ids = torch.tensor([*params.logit_bias], device=scores.device)
        scores = scores.index_put((biased_ids,), scores[biased_ids] + scores.new_tensor([*params.logit_bias.values()]))

    if params.repetition_penalty != 1:
        text_ids = torch.tensor([*prompt_ids, *output_ids], dtype=torch.long, device=scores.device)
        seen_ids = text_ids.unique()  # type: ignore[no-untyped-call]
        seen_scores = scores[seen_ids]
        penalized = torch.where(
            seen_scores > 0, seen_scores / params.repetition_penalty, seen_scores * params.repetition_penalty
        )
        scores = scores.index_put((seen_ids,), penalized)

    if output_ids and (params.frequency_penalty or params.presence_penalty):
        text_ids = torch.tensor(output_ids, device=scores.device)
        seen_ids, counts = text_ids.unique(return_counts=True)  # type: ignore[no-untyped-call]
        penalty = counts.double() * params.frequency_penalty + params.presence_penalty
        scores = scores.index_put((seen_ids,), scores[seen_ids] - penalty)

    return scores


def weights(scores: Tensor, params: SamplingParams) -> Tensor:
    """Return each token's probability as an integer weight, (vocabulary).

    The likeliest token has the weight UNIT_WEIGHT. Tokens excluded by top-k, top-p or min-p have weight 0. Equally
    likely tokens are all included or all excluded.
    `scores`: the adjusted logits as float64, (vocabulary).
    """
    import torch

    # 2ˣ as a Taylor series of the fraction, shifted by the integer part: exp() differs between devices.
    powers = ((scores - scores.max()) * (LOG2_E / params.temperature)).clamp(min=-62)
    integer = powers.round()
    fraction = powers - integer
    series = torch.full_like(fraction, SERIES[-1])
    for factor in reversed(SERIES[:-1]):
        series = series.mul_(fraction).add_(factor)
    weight = series.mul_(UNIT_WEIGHT).long() >> (-integer).long()

    if 0 < params.top_k < len(weight):
        weight = weight * (weight >= weight.topk(params.top_k).values[-1])
    if params.top_p < 1:
        weight = weight * (weight >= _nucleus_threshold(weight, params.top_p))
    if params.min_p > 0:
        weight = weight * (weight >= int(params.min_p * UNIT_WEIGHT))
    return weight


def _nucleus_threshold(weight: Tensor, share: float) -> Tensor:
    """Return the smallest weight among the likeliest tokens that have this share together."""
    total = int(weight.sum())

    # All tokens lighter than this weigh less than the excluded share together: the nucleus needs none of them.
    min_weight = int((1 - share) * total) // len(weight)
    candidates = weight[weight >= min_weight].sort(descending=True).values
    return candidates[int((candidates.cumsum(0) < int(share * total)).sum())]
