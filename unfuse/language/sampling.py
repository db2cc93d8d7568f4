"""Token sampling: choose the next token from the logits, deterministically.

Every step is exact or in integers, so that equal logits draw equal tokens on every device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, islice
from struct import pack, unpack
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
    prepared = [_prepare(text) for text in texts]
    ready = [text for text in prepared if isinstance(text, _Scored)]
    groups = [
        [text for text in ready if (text.params.temperature < GREEDY) is is_greedy] for is_greedy in (True, False)
    ]
    if ready and ready[0].scores.device.type == "cpu":  # where rows are faster alone: each fits into the cache
        groups = [[text] for group in groups for text in group]

    numbers = [row for group in groups if group for row in _numbers(group)]
    order = [id(text) for group in groups for text in group]
    sampled = dict(zip(order, _read(numbers), strict=True))
    return [text if isinstance(text, PermanentError) else sampled[id(text)] for text in prepared]


@dataclass(frozen=True, eq=False)
class _Scored:
    """A text whose next token is sampled from these scores."""

    #: The logits, (vocabulary,).
    logits: Tensor
    #: The scores of the tokens as float64, (vocabulary,): -inf for those that are not drawn.
    scores: Tensor
    #: Whether the largest logit is finite, as a tensor on the device.
    is_finite: Tensor
    #: How the token is sampled.
    params: SamplingParams
    #: Its position.
    position: int


def _prepare(text: NextToken) -> _Scored | PermanentError:
    """Return the scores of a text's tokens, or the error of its grammar."""
    scores = adjusted(text.logits, text.params, text.prompt_ids, text.output_ids)
    is_finite = scores.max().isfinite()
    if text.allowed is not None:
        try:
            scores = scores.masked_fill(~_unpack_mask(text.allowed, scores), float("-inf"))
        except PermanentError as error:
            return error
    scores = _exclude(scores, banned(text.params, text.output_ids))
    return _Scored(text.logits, scores, is_finite, text.params, text.position)


def _numbers(texts: Sequence[_Scored]) -> list[Tensor]:
    """Return the numbers of each text's sampled token as integers, (1 + further numbers,).

    The first is the token, or -1 for logits that are not finite. With logprobs there are the ids of the likeliest
    tokens, the token's logprob, and theirs; floats are stored by their bits.
    `texts`: all greedy, or all drawn.
    """
    import torch

    scores = torch.stack([text.scores for text in texts])
    params = [text.params for text in texts]
    if params[0].temperature < GREEDY:
        tokens = scores.argmax(1)
    else:
        # The draw is a point below the total weight. The token whose interval contains it is chosen.
        sums = _row_weights(scores, params).cumsum(1)
        chances = [chance(text.params.seed, text.position) for text in texts]
        tokens = (sums <= scaled_chances(chances, sums[:, -1:])).sum(1)
    tokens = tokens.where(torch.stack([text.is_finite for text in texts]), -1)

    numbers = [*tokens[:, None]]
    for row, text in enumerate(texts):
        if text.params.logprobs is not None:
            logprobs = text.logits.float().log_softmax(0)
            topk = logprobs.topk(min(text.params.logprobs, len(logprobs)))
            logprob = logprobs.gather(0, tokens[row : row + 1].clamp(0, len(logprobs) - 1))
            bits = torch.cat([logprob, topk.values]).double().view(torch.int64)
            numbers[row] = torch.cat([numbers[row], topk.indices, bits])
    return numbers


def _read(numbers: Sequence[Tensor]) -> list[SampledToken | PermanentError]:
    """Return the sampled tokens, or errors, of the results of `_numbers`.

    All of them are read at once.
    """
    import torch

    if not numbers:
        return []
    joined = iter(torch.cat([*numbers]).tolist())
    return [_sampled_token(*islice(joined, len(tensor))) for tensor in numbers]


def _sampled_token(token: int, *more: int) -> SampledToken | PermanentError:
    """Return a sampled token, or its error, from its numbers."""
    if token < 0:
        return PermanentError("the logits of the next token are not finite: the model's weights may be damaged")
    if not more:
        return SampledToken(token)
    count = len(more) // 2
    logprob, *values = (max(UNLIKELY, _float(bits)) for bits in more[count:])
    return SampledToken(token, logprob, tuple(zip(more[:count], values, strict=True)))


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


def _exclude(scores: Tensor, tokens: set[int]) -> Tensor:
    """Return the scores with -inf for these tokens, so that they are never drawn.

    The scores are unchanged if no other token is left: a grammar takes precedence.
    """
    known_ids = [token for token in tokens if token < len(scores)]
    if not known_ids:
        return scores
    other_scores = scores.index_fill(0, _on_device(known_ids, scores), float("-inf"))
    return other_scores.where(other_scores.max() > float("-inf"), scores)


def _unpack_mask(bits: bytes, scores: Tensor) -> Tensor:
    """Return a boolean tensor in the shape of `scores`: whether each token's bit is set.

    Tokens beyond the bits are false. Raises PermanentError if no token's bit is set.
    """
    import torch

    if not int.from_bytes(bits, "little") & (1 << len(scores)) - 1:
        raise PermanentError("the grammar allows only tokens that the model does not have")
    host = torch.frombuffer(bytearray(bits), dtype=torch.uint8)
    packed = host.to(scores.device, non_blocking=scores.device.type != "cpu")
    bits_set = (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=scores.device) & 1).bool().view(-1)

    mask = torch.zeros_like(scores, dtype=torch.bool)
    length = min(len(bits_set), len(scores))
    mask[:length] = bits_set[:length]
    return mask


def _on_device(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Return numbers as an int64 or float64 tensor on a tensor's device.

    The host does not wait for the copy.
    """
    import torch

    dtype = torch.float64 if any(isinstance(number, float) for number in numbers) else torch.int64
    return torch.tensor(numbers, dtype=dtype).to(like.device, non_blocking=like.device.type != "cpu")


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
        biased_ids = _on_device([*params.logit_bias], scores)
        biases = _on_device([*map(float, params.logit_bias.values())], scores)
        scores = scores.index_put((biased_ids,), scores[biased_ids] + biases)

    if params.repetition_penalty != 1:
        seen_ids = _on_device([*{*prompt_ids, *output_ids}], scores)
        seen_scores = scores[seen_ids]
        penalized = torch.where(
            seen_scores > 0, seen_scores / params.repetition_penalty, seen_scores * params.repetition_penalty
        )
        scores = scores.index_put((seen_ids,), penalized)

    if output_ids and (params.frequency_penalty or params.presence_penalty):
        counts = Counter(output_ids)
        penalties = [float(count) * params.frequency_penalty + params.presence_penalty for count in counts.values()]
        seen_ids = _on_device([*counts], scores)
        scores = scores.index_put((seen_ids,), scores[seen_ids] - _on_device(penalties, scores))

    return scores


def weights(scores: Tensor, params: SamplingParams) -> Tensor:
    """Return each token's probability as an integer weight, (vocabulary).

    The likeliest token has the weight UNIT_WEIGHT. Tokens excluded by top-k, top-p or min-p have weight 0. Equally
    likely tokens are all included or all excluded.
    `scores`: the adjusted logits as float64, (vocabulary).
    """
    return _row_weights(scores[None], [params])[0]


def _row_weights(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the weights of several texts, (texts, vocabulary). `scores`: of the same shape."""
    import torch

    # 2ˣ as a Taylor series of the fraction, shifted by the integer part: exp() differs between devices.
    factors = _on_device([LOG2_E / row_params.temperature for row_params in params], scores)[:, None]
    powers = ((scores - scores.amax(1, keepdim=True)) * factors).clamp(min=-62)
    integer = powers.round()
    fraction = powers - integer
    series = torch.full_like(fraction, SERIES[-1])
    for factor in reversed(SERIES[:-1]):
        series = series.mul_(fraction).add_(factor)
    weight = series.mul_(UNIT_WEIGHT).long() >> (-integer).long()
    is_plain = all(not row.top_k and row.top_p >= 1 and row.min_p <= 0 for row in params)
    return weight if is_plain else torch.stack([*map(_likeliest, weight, params)])


def _likeliest(weight: Tensor, params: SamplingParams) -> Tensor:
    """Return a text's weights, (vocabulary), with 0 for tokens that top-k, top-p or min-p exclude."""
    if 0 < params.top_k < len(weight):
        weight = weight * (weight >= weight.topk(params.top_k).values[-1])
    if params.top_p < 1:
        weight = weight * (weight >= _nucleus_threshold(weight, params.top_p))
    if params.min_p > 0:
        weight = weight * (weight >= int(params.min_p * UNIT_WEIGHT))
    return weight


def _nucleus_threshold(weight: Tensor, share: float) -> Tensor:
    """Return the smallest weight among the likeliest tokens that have this share together."""
    total = weight.sum()
    candidates = weight
    if weight.device.type == "cpu":
        # All tokens lighter than this weigh less than the excluded share together: the nucleus needs none of them.
        # A GPU sorts all of them, because it would have to be awaited for the number of the others.
        candidates = weight[weight >= int((1 - share) * int(total)) // len(weight)]
    sorted_weights = candidates.sort(descending=True).values
    first_outside = (sorted_weights.cumsum(0) < (total.double() * share).long()).sum()
    return sorted_weights.gather(0, first_outside.clamp(max=len(sorted_weights) - 1)[None])


#: Bits of a limb in which products of more than 64 bits are computed. Sums of three products of two fit into 64 bits.
LIMB = 22


def scaled_chances(chances: Sequence[int], totals: Tensor) -> Tensor:
    """Return chance × total / 2⁶⁴ for each text, rounded down, (texts, 1).

    The product has more than 64 bits, so it is computed in limbs. `chances`: below 2⁶⁴. `totals`: (texts, 1).
    """
    mask = (1 << LIMB) - 1
    limbs = [[number >> LIMB * limb & mask for number in chances] for limb in range(3)]
    low, middle, high = [_on_device(limb, totals)[:, None] for limb in limbs]
    total_low, total_high = totals & mask, totals >> 2 * LIMB
    total_middle = totals >> LIMB & mask

    carry = (low * total_low >> LIMB) + low * total_middle + middle * total_low
    third = (carry >> LIMB) + low * total_high + middle * total_middle + high * total_low
    rest = 64 - 2 * LIMB  # the bits of the third limb that are below the result
    return (
        (third >> rest)
        + (middle * total_high + high * total_middle << LIMB - rest)
        + (high * total_high << 2 * LIMB - rest)
    )
