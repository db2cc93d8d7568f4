"""Which token comes next. Every step of it is exact or in whole numbers: equal logits draw equal tokens everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec

from unfuse.core.errors import PermanentError

if TYPE_CHECKING:
    from torch import Tensor

ONE = 1 << 40  # the weight of the likeliest token: 2⁴⁰ times less likely is never drawn, and sums of any vocabulary fit
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
SERIES = tuple(accumulate(range(1, 9), lambda term, n: term * LN_2 / n, initial=1.0))  # 2ˣ, right to 2·10⁻¹⁰ to x = ½
GREEDY = 1e-5  # temperatures below this take the likeliest token, as in vLLM
UNLIKELY = -9999.0  # what OpenAI's API says for the logarithm of next to nothing


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens are drawn. Without fields: from what the model says.

    `temperature` 0 takes the likeliest token. `top_k` (0: all), `top_p` and `min_p` leave out unlikely ones.
    `logit_bias` is added by token. `repetition_penalty` is for tokens of prompt and text, `presence_penalty` for those
    of the text, `frequency_penalty` for each time they are there. `logprobs`: how many of the likeliest tokens to tell.
    The tokens `ends` are not drawn before `min_tokens` others, and no token is drawn that completes one of `bad_words`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int | None = None
    min_tokens: int = 0
    ends: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


class SampledToken(msgspec.Struct, frozen=True):
    """A token, and if asked for its logprob and (id, logprob) of the likeliest tokens, by what the model says.

    Logprobs are those before bias, penalties and temperature, as in vLLM by default (`raw_logprobs`). OpenAI does not
    say which theirs are; they do not change with the temperature.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(
    logits: Tensor,
    how: SamplingParams,
    position: int,
    prompt_ids: Sequence[int],
    made_ids: Sequence[int],
    allowed: bytes | None = None,
) -> SampledToken:
    """Draw the token at a position of a text, from logits (vocabulary), of those with a bit in `allowed`, if given.

    In transformers' order: bias, penalties, what is allowed, temperature, top-k, top-p, min-p. vLLM, too, has the bias
    before the penalties. A greedy choice among equals is the lowest id. Raises PermanentError for logits that are not
    numbers.
    """
    scores = adjusted(logits, how, prompt_ids, made_ids)
    if not bool(scores.max().isfinite()):
        raise PermanentError("the model gives no numbers for the next token: its weights may be damaged")
    if allowed is not None:
        scores = scores.masked_fill(~_marked(allowed, scores), float("-inf"))
    scores = _without(scores, banned(how, made_ids))
    if how.temperature < GREEDY:
        token = int(scores.argmax())
    else:
        sums = weights(scores, how).cumsum(0)
        drawn = chance(how.seed, position) * int(sums[-1]) >> 64
        token = int((sums <= drawn).sum())
    if how.logprobs is None:
        return SampledToken(token)
    logprobs = logits.float().log_softmax(0)
    best = logprobs.topk(min(how.logprobs, len(logprobs)))
    top = tuple(zip(best.indices.tolist(), best.values.clamp(min=UNLIKELY).tolist(), strict=True))
    return SampledToken(token, max(UNLIKELY, float(logprobs[token])), top)


def banned(how: SamplingParams, made_ids: Sequence[int]) -> set[int]:
    """Return the tokens that must not be drawn next."""
    found = {*how.ends} if len(made_ids) < how.min_tokens else set[int]()
    for *before, last in how.bad_words:
        if not before or [*made_ids[-len(before) :]] == before:
            found.add(last)
    return found


def _without(scores: Tensor, tokens: set[int]) -> Tensor:
    """Return scores with which these tokens are never drawn.

    They are unchanged if no other token is left: a grammar takes precedence.
    """
    import torch

    known = [token for token in tokens if token < len(scores)]
    if not known:
        return scores
    others = scores.index_fill(0, torch.tensor(known, device=scores.device), float("-inf"))
    return others if bool(others.max() > float("-inf")) else scores


def _marked(bits: bytes, scores: Tensor) -> Tensor:
    """Which scores have their bit set; those beyond the bits have not. Raises PermanentError if none has."""
    import torch

    packed = torch.frombuffer(bytearray(bits), dtype=torch.uint8).to(scores.device)
    marks = (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=scores.device) & 1).bool().view(-1)
    marked = torch.zeros_like(scores, dtype=torch.bool)
    length = min(len(marks), len(scores))
    marked[:length] = marks[:length]
    if not bool(marked.any()):
        raise PermanentError("the grammar allows only tokens that the model does not have")
    return marked


def chance(seed: int, position: int) -> int:
    """A draw from 64 bits that seed and position alone decide: a retry draws it again, whatever came between."""
    return int.from_bytes(blake2b(f"{seed}:{position}".encode(), digest_size=8).digest())


def adjusted(logits: Tensor, how: SamplingParams, prompt_ids: Sequence[int], made_ids: Sequence[int]) -> Tensor:
    """Logits as float64 with bias and penalties, the repetition penalty first as in vLLM."""
    import torch

    scores = logits.double()
    if how.logit_bias:
        biased = torch.tensor([*how.logit_bias], device=scores.device)
        scores = scores.index_put((biased,), scores[biased] + scores.new_tensor([*how.logit_bias.values()]))
    if how.repetition_penalty != 1:
        there = torch.tensor([*prompt_ids, *made_ids], dtype=torch.long, device=scores.device)
        seen = there.unique()  # type: ignore[no-untyped-call]
        said = scores[seen]
        said = torch.where(said > 0, said / how.repetition_penalty, said * how.repetition_penalty)
        scores = scores.index_put((seen,), said)
    if made_ids and (how.frequency_penalty or how.presence_penalty):
        there = torch.tensor(made_ids, device=scores.device)
        made, counts = there.unique(return_counts=True)  # type: ignore[no-untyped-call]
        less = counts.double() * how.frequency_penalty + how.presence_penalty
        scores = scores.index_put((made,), scores[made] - less)
    return scores


def weights(scores: Tensor, how: SamplingParams) -> Tensor:
    """How likely tokens are beside ONE of the likeliest, 0 if left out; equal ones are kept or left out together."""
    import torch

    powers = ((scores - scores.max()) * (LOG2_E / how.temperature)).clamp(min=-62)
    whole = powers.round()
    rest = powers - whole
    series = torch.full_like(rest, SERIES[-1])
    for factor in reversed(SERIES[:-1]):
        series = series.mul_(rest).add_(factor)
    weight = series.mul_(ONE).long() >> (-whole).long()
    if 0 < how.top_k < len(weight):
        weight = weight * (weight >= weight.topk(how.top_k).values[-1])
    if how.top_p < 1:
        weight = weight * (weight >= _last_of_nucleus(weight, how.top_p))
    if how.min_p > 0:
        weight = weight * (weight >= int(how.min_p * ONE))
    return weight


def _last_of_nucleus(weight: Tensor, share: float) -> Tensor:
    """The smallest weight among the likeliest tokens that have this share together."""
    total = int(weight.sum())
    least = int((1 - share) * total) // len(weight)  # all that weigh less are not what the others lack
    largest = weight[weight >= least].sort(descending=True).values
    return largest[int((largest.cumsum(0) < int(share * total)).sum())]
