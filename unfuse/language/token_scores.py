"""Scores of the next tokens of several texts, as rows of tensors on one device.

Nothing is read on the host, except on a CPU. A row has the same values in every company: each operation is exact, in
integers, or on one number by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING

from unfuse.language.sampling_params import NextToken, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

#: The weight of the likeliest token. A token more than 2⁴⁰ times less likely has weight 0 and is never drawn.
#: The sum of the weights of any vocabulary fits into 64 bits.
UNIT_WEIGHT = 1 << 40

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

#: Coefficients of the Taylor series of 2ˣ. It is accurate to 2·10⁻¹⁰ for |x| ≤ ½.
SERIES = tuple(accumulate(range(1, 9), lambda term, n: term * LN_2 / n, initial=1.0))


def on_device(like: Tensor, integers: Sequence[Sequence[int]], floats: Sequence[Sequence[float]] = ()) -> list[Tensor]:
    """Return lists of numbers as int64 and float64 tensors on a tensor's device.

    There is one copy, and the host does not wait for it.
    """
    import torch

    columns = [(torch.int64, integers), (torch.float64, floats)]
    bits = [torch.tensor([*chain(*lists)], dtype=dtype).view(torch.int64) for dtype, lists in columns if lists]
    packed = bits[0] if len(bits) == 1 else torch.cat(bits)
    if like.device.type != "cpu":
        packed = packed.to(like.device, non_blocking=True)
    parts = torch.split(packed, [*map(len, (*integers, *floats))])
    return [*parts[: len(integers)], *(part.view(torch.float64) for part in parts[len(integers) :])]


def allows_none(allowed: bytes, vocabulary: int) -> bool:
    """Return whether a bit mask has no bit of a token of the vocabulary."""
    return not int.from_bytes(allowed, "little") & (1 << vocabulary) - 1


def adjusted_scores(logits: Tensor, texts: Sequence[NextToken], banned: Sequence[set[int]]) -> tuple[Tensor, Tensor]:
    """Return the scores of all tokens, and whether the largest of each text is finite.

    Scores are logits with bias and penalties as float64, (texts, vocabulary), and -inf for tokens that must not be
    drawn. The second tensor is (texts,).

    `logits`: (texts, vocabulary).
    `banned`: the tokens of each text that are not drawn, unless its grammar allows no others.
    """
    scores = penalized(logits, texts)
    is_finite = scores.amax(1).isfinite()
    masks = [text.allowed for text in texts]
    if masks != [None] * len(masks):
        scores = scores.masked_fill(~_unpack_masks(masks, scores), float("-inf"))
        is_finite = is_finite & scores.amax(1).isfinite()
    return _exclude(scores, banned), is_finite


def penalized(logits: Tensor, texts: Sequence[NextToken]) -> Tensor:
    """Return the logits as float64 with bias and penalties applied, (texts, vocabulary).

    The repetition penalty is the first one, as in vLLM.
    """
    import torch

    scores = logits.to(torch.float64, copy=True)
    flat, size = scores.view(-1), scores.shape[1]
    biases, penalties = dict[int, float](), dict[int, float]()
    seen_ids, seen_counts = list[int](), list[int]()
    for row, text in enumerate(texts):
        params, first = text.params, row * size
        biases |= {first + token: float(bias) for token, bias in params.logit_bias.items() if token < size}
        seen = {*text.prompt_ids, *text.output_ids} if params.repetition_penalty != 1 else ()
        seen_ids += [first + token for token in seen]
        seen_counts.append(len(seen))
        if params.frequency_penalty or params.presence_penalty:
            penalties |= {
                first + token: -(float(count) * params.frequency_penalty + params.presence_penalty)
                for token, count in Counter(text.output_ids).items()
            }
    if not (biases or penalties or seen_ids):
        return scores

    bias_ids, penalty_ids, ids, counts, bias_values, penalty_values, factors = on_device(
        scores,
        [[*biases], [*penalties], seen_ids, seen_counts],
        [[*biases.values()], [*penalties.values()], [text.params.repetition_penalty for text in texts]],
    )
    if biases:
        flat.index_add_(0, bias_ids, bias_values)
    if seen_ids:
        seen_scores, seen_factors = flat[ids], factors.repeat_interleave(counts, output_size=len(seen_ids))
        flat[ids] = torch.where(seen_scores > 0, seen_scores / seen_factors, seen_scores * seen_factors)
    if penalties:
        flat.index_add_(0, penalty_ids, penalty_values)
    return scores


def _unpack_masks(masks: Sequence[bytes | None], scores: Tensor) -> Tensor:
    """Return whether each token's bit is set, in the shape of `scores`.

    Without a mask, all are true. Tokens beyond the bits are false.
    """
    import torch

    size = -(-scores.shape[1] // 8)
    joined = b"".join(b"\xff" * size if mask is None else mask[:size].ljust(size, b"\0") for mask in masks)
    host = torch.frombuffer(bytearray(joined), dtype=torch.uint8).view(len(masks), size, 1)
    packed = host.to(scores.device, non_blocking=scores.device.type != "cpu")
    bits = packed >> torch.arange(8, dtype=torch.uint8, device=scores.device) & 1
    return bits.bool().flatten(1)[:, : scores.shape[1]]


def _exclude(scores: Tensor, tokens: Sequence[set[int]]) -> Tensor:
    """Return the scores with -inf for these tokens of each text.

    So they are never drawn. The scores of a text are unchanged if no other token is left: a grammar takes precedence.
    """
    size = scores.shape[1]
    ids = [row * size + token for row, excluded in enumerate(tokens) for token in excluded if token < size]
    if not ids:
        return scores
    (device_ids,) = on_device(scores, [ids])
    other_scores = scores.view(-1).index_fill(0, device_ids, float("-inf")).view_as(scores)
    return other_scores.where(other_scores.amax(1, keepdim=True) > float("-inf"), scores)


def drawn_tokens(scores: Tensor, params: Sequence[SamplingParams], chances: Sequence[int]) -> Tensor:
    """Return the token that each text draws, (texts,).

    `chances`: a random number of 64 bits for each.
    """
    # The draw is a point below the total weight. The token whose interval contains it is chosen.
    sums = token_weights(scores, params).cumsum(1)
    return (sums <= scaled_chances(chances, sums[:, -1:])).sum(1)


def token_weights(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return each token's probability as an integer weight, (texts, vocabulary).

    The likeliest token of a text has the weight UNIT_WEIGHT. Tokens excluded by top-k, top-p or min-p have weight 0.
    Equally likely tokens are all included or all excluded.
    `scores`: those of `adjusted_scores`.
    """
    import torch

    # 2ˣ as a Taylor series of the fraction, shifted by the integer part: exp() differs between devices.
    (factors,) = on_device(scores, [], [[LOG2_E / text.temperature for text in params]])
    powers = ((scores - scores.amax(1, keepdim=True)) * factors[:, None]).clamp(min=-62)
    integer = powers.round()
    fraction = powers - integer
    series = torch.full_like(fraction, SERIES[-1])
    for factor in reversed(SERIES[:-1]):
        series = series.mul_(fraction).add_(factor)
    weight = series.mul_(UNIT_WEIGHT).long() >> (-integer).long()
    is_plain = all(not text.top_k and text.top_p >= 1 and text.min_p <= 0 for text in params)
    return weight if is_plain else weight * (weight >= _thresholds(weight, params))


def _thresholds(weight: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the least weight of a token that top-k, top-p and min-p include, (texts, 1)."""
    size = weight.shape[1]
    limits = [text.top_k if 0 < text.top_k < size else 0 for text in params]
    min_weights = [int(text.min_p * UNIT_WEIGHT) if text.min_p > 0 else 0 for text in params]
    shares = [float(text.top_p) for text in params]
    last, is_limited, is_nucleus, least, device_shares = (
        column[:, None]
        for column in on_device(
            weight,
            [
                [max(0, limit - 1) for limit in limits],
                [*map(bool, limits)],
                [share < 1 for share in shares],
                min_weights,
            ],
            [shares],
        )
    )
    has_nucleus = min(shares) < 1
    if not any(limits) and not has_nucleus:
        return least

    threshold, sorted_weight = least, _sorted_weights(weight, limits, shares)
    # A weight of 0 excludes nothing.
    if any(limits):
        limit_weight = sorted_weight.gather(1, last) * is_limited
        threshold = threshold.maximum(limit_weight)
    if has_nucleus:
        if any(limits):
            weight, sorted_weight = (tensor * (tensor >= limit_weight) for tensor in (weight, sorted_weight))
        threshold = threshold.maximum(_nucleus_thresholds(weight, sorted_weight, device_shares) * is_nucleus)
    return threshold


def _sorted_weights(weight: Tensor, limits: Sequence[int], shares: Sequence[float]) -> Tensor:
    """Return the largest weights of each text in descending order.

    There are as many as the top-k and top-p of any text may need.

    `limits`: the top-k of each text, or 0.
    `shares`: its top-p.
    """
    size = weight.shape[1]
    most = max(limit or (size if share < 1 else 1) for limit, share in zip(limits, shares, strict=True))
    if most < size:
        # A text with both needs no more: all further weights that its top-k includes are equal to the last of these.
        return weight.topk(most).values
    candidates = weight
    if weight.device.type == "cpu" and len(weight) == 1:
        # All tokens lighter than this weigh less than the excluded share together: the nucleus needs none of them.
        # A GPU sorts all of them, because it would have to be awaited for the number of the others.
        heavy = weight[weight >= int((1 - shares[0]) * int(weight.sum())) // size][None]
        candidates = heavy if heavy.numel() else weight  # no weight is heavy if logits are not finite
    return candidates.sort(descending=True).values


def _nucleus_thresholds(weight: Tensor, sorted_weight: Tensor, shares: Tensor) -> Tensor:
    """Return the smallest weight in each nucleus, (texts, 1).

    The nucleus is the likeliest tokens that have the text's share together.
    """
    totals = weight.sum(1, keepdim=True)
    first_outside = (sorted_weight.cumsum(1) < (totals.double() * shares).long()).sum(1, keepdim=True)
    return sorted_weight.gather(1, first_outside.clamp(max=sorted_weight.shape[1] - 1))


def logprob_numbers(logits: Tensor, tokens: Tensor, counts: Sequence[int | None]) -> Tensor:
    """Return the logprobs of the texts that have a count, as integers.

    They are (those texts, 1 + 2 × the largest count): the ids of the likeliest tokens, then the bits of the doubles of
    the token's logprob and of theirs.

    `logits`: (texts, vocabulary).
    `tokens`: the sampled ones, (texts,).
    """
    import torch

    rows = [row for row, count in enumerate(counts) if count is not None]
    if len(rows) < len(counts):
        (device_rows,) = on_device(tokens, [rows])
        logits, tokens = logits[device_rows], tokens[device_rows]
    logprobs = logits.float().log_softmax(1)
    topk = logprobs.topk(min(max(filter(None, counts), default=0), logprobs.shape[1]))
    sampled = logprobs.gather(1, tokens.clamp(0, logprobs.shape[1] - 1)[:, None])
    bits = torch.cat([sampled, topk.values], 1).double().view(torch.int64)
    return torch.cat([topk.indices, bits], 1)


#: Bits of a limb in which products of more than 64 bits are computed. Sums of three products of two fit into 64 bits.
LIMB = 22


def scaled_chances(chances: Sequence[int], totals: Tensor) -> Tensor:
    """Return chance × total / 2⁶⁴ for each text, rounded down, (texts, 1).

    The product has more than 64 bits, so it is computed in limbs. `chances`: below 2⁶⁴. `totals`: (texts, 1).
    """
    mask = (1 << LIMB) - 1
    limbs = [[number >> LIMB * limb & mask for number in chances] for limb in range(3)]
    low, middle, high = (limb[:, None] for limb in on_device(totals, limbs))
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
