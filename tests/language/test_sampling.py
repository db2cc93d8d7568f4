"""Which token is drawn, beside transformers' processors, exact arithmetic and counted draws."""

from collections import Counter
from collections.abc import Sequence
from decimal import Decimal, localcontext
from hashlib import blake2b
from itertools import accumulate

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from msgspec.structs import replace

from tests.examples import examples
from unfuse.core.checking import check_request
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import PermanentError
from unfuse.core.modalities import TEXT
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import Pipeline
from unfuse.core.text_parameters import PromptTokens
from unfuse.language import sampling
from unfuse.language.sampling import SampledToken, banned, sample, sample_all
from unfuse.language.sampling_params import NextToken, SamplingParams
from unfuse.language.token_scores import LOG2_E, UNIT_WEIGHT, penalized, scaled_chances, token_weights
from unfuse.stages.language import ending

PROMPT, MADE = [3, 5, 5, 8], [8, 9, 9, 9]
GREEDY = SamplingParams(temperature=0)


def logits(vocabulary: int = 500, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed))


def adjusted(given: torch.Tensor, how: SamplingParams, prompt: Sequence[int], made: Sequence[int]) -> torch.Tensor:
    (scores,) = penalized(given[None], [NextToken(given, how, 0, prompt, made)])
    return scores


def weights(scores: torch.Tensor, how: SamplingParams) -> torch.Tensor:
    return token_weights(scores[None], [how])[0]


def draws(given: torch.Tensor, how: SamplingParams, count: int) -> Counter[int]:
    return Counter(sample(given, how, position, [], []).token for position in range(count))


def expected(given: torch.Tensor, how: SamplingParams) -> torch.Tensor:
    """Probabilities by transformers' own processors, in its own order."""
    from transformers.generation import logits_process as of

    bias = {(id,): bias for id, bias in how.logit_bias.items()}
    steps = [of.SequenceBiasLogitsProcessor(bias)] if bias else []
    steps += [of.RepetitionPenaltyLogitsProcessor(how.repetition_penalty), of.TemperatureLogitsWarper(how.temperature)]
    steps += [of.TopKLogitsWarper(how.top_k)] if how.top_k else []
    steps += [of.TopPLogitsWarper(how.top_p), of.MinPLogitsWarper(how.min_p)]
    scores = of.LogitsProcessorList(steps)(torch.tensor([PROMPT + MADE]), given[None].double())
    return scores[0].softmax(0)


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "how",
    [
        SamplingParams(),
        SamplingParams(temperature=0.3),
        SamplingParams(top_k=7),
        SamplingParams(top_k=10_000),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.02),
        SamplingParams(min_p=0.1),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(repetition_penalty=0.5, temperature=2.0, top_k=30),
        SamplingParams(logit_bias={7: 100.0, 400: -5.0}),
        SamplingParams(logit_bias={8: 4.0, 9: -4.0}, repetition_penalty=1.7),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.8, min_p=0.05),
        SamplingParams(temperature=1.8, top_k=100, top_p=0.95, min_p=0.01, repetition_penalty=1.2, logit_bias={5: 2.0}),
    ],
)
def test_probabilities_match_transformers(how: SamplingParams, seed: int) -> None:
    given = logits(seed=seed)
    weight = weights(adjusted(given, how, PROMPT, MADE), how).double()
    theirs = expected(given, how)
    assert bool((weight[theirs == 0] == 0).all()) and bool((weight[theirs > 1e-11] > 0).all())
    torch.testing.assert_close(weight / weight.sum(), theirs, rtol=1e-6, atol=1e-11)


def test_repetition_penalty_without_tokens_changes_nothing() -> None:
    given = logits()
    assert torch.equal(adjusted(given, SamplingParams(repetition_penalty=1.5), [], []), given.double())


def test_frequency_and_presence_penalties_ignore_the_prompt() -> None:
    given = torch.zeros(10)
    scores = adjusted(given, SamplingParams(frequency_penalty=0.5, presence_penalty=1.0), PROMPT, MADE)
    assert scores.tolist() == [0] * 8 + [-1.5, -2.5]
    assert given.tolist() == [0] * 10
    assert adjusted(given, SamplingParams(frequency_penalty=0.5), PROMPT, []).tolist() == [0] * 10


@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=20), st.integers(), st.integers(0, 1 << 20))
def test_sampled_token_follows_hash_of_seed_and_position(values: list[float], seed: int, position: int) -> None:
    token = sample(torch.tensor(values), SamplingParams(seed=seed), position, [], []).token
    with localcontext(prec=60):
        likely = [(Decimal(value) - Decimal(max(values))).exp() for value in values]
        sums = list(accumulate(likely))
        hashed = int.from_bytes(blake2b(f"{seed}:{position}".encode(), digest_size=8).digest())
        wanted, little = Decimal(hashed) / 2**64 * sums[-1], Decimal("1e-7")
        assert (sums[token] - likely[token]) - little <= wanted <= sums[token] + little


@pytest.mark.parametrize(
    "how", [SamplingParams(seed=1), SamplingParams(seed=2, temperature=1.5), SamplingParams(seed=3, top_p=0.9)]
)
def test_sampled_frequencies_match_probabilities(how: SamplingParams) -> None:
    """Chi square of 5,000 draws beside the probabilities: the positions are fixed, so it is one number for ever."""
    given, count = logits(12, seed=4, scale=1.0), 5_000
    likely = weights(given.double(), how).double()
    likely = likely / likely.sum()

    found = draws(given, how, count)

    assert found.keys() <= {id for id, share in enumerate(likely.tolist()) if share}
    off = sum((found[id] - count * share) ** 2 / (count * share) for id, share in enumerate(likely.tolist()) if share)
    assert off < 31  # of 11 degrees of freedom, one of a thousand is larger


def test_consecutive_samples_are_independent() -> None:
    even = torch.zeros(4)
    drawn = [sample(even, SamplingParams(seed=5), position, [], []).token for position in range(4_001)]
    pairs = Counter(zip(drawn, drawn[1:], strict=False))
    assert sum((pairs[a, b] - 250) ** 2 / 250 for a in range(4) for b in range(4)) < 38  # of 15 degrees, as above


@pytest.mark.parametrize(("hashed", "token"), [(0, 1), (2**63, 3), (2**64 - 1, 3)])
def test_excluded_token_is_not_sampled_at_any_hash(hashed: int, token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "chance", lambda seed, position: hashed)
    given = torch.tensor([-torch.inf, 0.0, -1e30, 0.0, -60.0])
    assert weights(given.double(), SamplingParams()).tolist() == [0, UNIT_WEIGHT, 0, UNIT_WEIGHT, 0]
    assert sample(given, SamplingParams(), 0, [], []).token == token


def test_top_p_includes_the_token_that_reaches_the_threshold() -> None:
    powers_of_two, how = torch.tensor([-1.0, 0.0, -1.0, -2.0]), SamplingParams(temperature=LOG2_E)
    shares = {0.44: 1, 0.45: 3, 0.88: 3, 0.89: 4}  # of 4, 2, 2 and 1 ninths
    for share, left in shares.items():
        assert int((weights(powers_of_two.double(), replace(how, top_p=share)) > 0).sum()) == left
    assert weights(powers_of_two[:3].double(), replace(how, top_p=0.5)).tolist() == [0, UNIT_WEIGHT, 0]


def test_samples_differ_between_seeds_and_repeat_for_equal_seeds() -> None:
    even = torch.zeros(50_000)

    def drawn(seed: int) -> Sequence[int]:
        return [sample(even, SamplingParams(seed=seed), position, [], []).token for position in range(4)]

    assert drawn(1) == drawn(1)
    assert len({*drawn(1), *drawn(2), *drawn(-1), *drawn(2**70)}) == 16


def bits(ids: Sequence[int], size: int) -> bytes:
    """A bit for each token, least first, set for these."""
    return sum(1 << id for id in {*ids}).to_bytes(-(-size // 8), "little")


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize(
    "how", [SamplingParams(top_k=7), SamplingParams(temperature=0.7, top_p=0.8, repetition_penalty=1.3)]
)
def test_grammar_constrained_sampling_matches_transformers(how: SamplingParams) -> None:
    """Its place is behind the penalties and before the temperature, so that the likeliest ones are those allowed."""
    from transformers.generation import logits_process as of

    given, ids = logits(), [*range(0, 500, 9), *MADE]
    steps = [
        of.RepetitionPenaltyLogitsProcessor(how.repetition_penalty),
        of.PrefixConstrainedLogitsProcessor(lambda row, said: ids, 1),
        of.TemperatureLogitsWarper(how.temperature),
        *([of.TopKLogitsWarper(how.top_k)] if how.top_k else []),
        of.TopPLogitsWarper(how.top_p),
    ]
    theirs = of.LogitsProcessorList(steps)(torch.tensor([PROMPT + MADE]), given[None].double())[0].softmax(0)
    drawn = [sample(given, replace(how, seed=9), place, PROMPT, MADE, bits(ids, 500)).token for place in range(2000)]
    assert {*drawn} <= {*theirs.nonzero().flatten().tolist()}
    likely = theirs.topk(3)
    for id, share in zip(likely.indices.tolist(), likely.values.tolist(), strict=True):
        assert abs(drawn.count(id) / 2000 - share) < 4 * (share * (1 - share) / 2000) ** 0.5


@given(
    st.sets(st.integers(0, 9), min_size=1),
    st.integers(0, 1 << 20),
    st.sampled_from([GREEDY, SamplingParams(), SamplingParams(top_k=1)]),
)
def test_only_allowed_tokens_are_sampled(ids: set[int], position: int, how: SamplingParams) -> None:
    assert sample(logits(10), how, position, [], [], bits([*ids], 10)).token in ids


def test_tokens_beyond_the_mask_are_not_allowed() -> None:
    given = torch.tensor([0.0, 1.0, 2.0, 90.0])
    assert sample(given[:2], GREEDY, 0, [], [], b"\xff").token == 1
    assert sample(torch.cat([torch.zeros(8), given]), GREEDY, 0, [], [], b"\x02").token == 1
    with pytest.raises(PermanentError, match="allows only tokens"):
        sample(given, GREEDY, 0, [], [], b"\x10")


def test_logprob_ignores_the_grammar_mask() -> None:
    how = SamplingParams(temperature=0, logprobs=2)
    free, held = sample(logits(), how, 0, [], []), sample(logits(), how, 0, [], [], bits([7], 500))
    assert held.token == 7 and held.top == free.top
    assert held.logprob == pytest.approx(float(logits().log_softmax(0)[7]))


def test_sampling_does_not_depend_on_logits_dtype() -> None:
    given = logits(1000).bfloat16()
    how = SamplingParams(seed=6, top_p=0.95, repetition_penalty=1.1)
    drawn = [
        [sample(kind, how, position, PROMPT, MADE).token for position in range(30)]
        for kind in (given, given.float(), given.double())
    ]
    assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_greedy_sampling_returns_lowest_id_of_likeliest_tokens(temperature: float) -> None:
    given = torch.tensor([1.0, 7.0, 3.0, 7.0, 7.0])
    assert sample(given, replace(GREEDY, temperature=temperature), 0, [], []).token == 1
    assert sample(given, replace(GREEDY, logit_bias={2: 9.0}), 0, [], []).token == 2
    assert sample(given, replace(GREEDY, presence_penalty=2.0), 0, [], [1, 3]).token == 4


@pytest.mark.parametrize("how", [SamplingParams(top_k=1), SamplingParams(top_p=0.0), SamplingParams(min_p=1.0)])
def test_likeliest_token_is_never_filtered_out(how: SamplingParams) -> None:
    given = logits()
    assert draws(given, how, 20) == {int(given.argmax()): 20}


def test_tied_tokens_are_filtered_together() -> None:
    given = torch.tensor([2.0, 1.0, 1.0, 0.0])
    for how in (SamplingParams(top_k=2), SamplingParams(top_p=0.7)):
        assert (weights(given.double(), how) > 0).tolist() == [True, True, True, False]


@pytest.mark.parametrize("share", [0.5, 0.999999, 1 - 2**-53])
def test_half_a_million_equal_tokens_can_all_be_sampled(share: float) -> None:
    """Their sum fits, and any share of it takes them all."""
    even = torch.zeros(500_000)
    assert bool((weights(even.double(), SamplingParams(top_p=share)) > 0).all())
    assert len(draws(even, SamplingParams(), 8)) == 8


def test_logprobs_are_computed_before_sampling_adjustments() -> None:
    given = logits(40)
    raw = given.log_softmax(0)
    best = raw.argsort(descending=True).tolist()[:3]
    how = SamplingParams(temperature=0.1, top_k=2, logit_bias={best[0]: -50.0}, repetition_penalty=3.0, logprobs=3)

    made = sample(given, how, 0, PROMPT, MADE)

    assert made.token in best[1:]
    assert made.logprob == pytest.approx(float(raw[made.token]))
    assert [id for id, _ in made.top] == best
    assert [logprob for _, logprob in made.top] == pytest.approx(raw[best].tolist())


def test_number_of_top_logprobs_follows_the_request() -> None:
    given = logits(40)
    assert sample(given, GREEDY, 0, [], []) == SampledToken(int(given.argmax()))
    assert sample(given, replace(GREEDY, logprobs=0), 0, [], []).top == ()
    assert len(sample(torch.zeros(3), replace(GREEDY, logprobs=20), 0, [], []).top) == 3


def test_impossible_token_has_logprob_minus_9999() -> None:
    made = sample(torch.tensor([0.0, -torch.inf]), replace(GREEDY, logprobs=2), 0, [], [])
    assert made.top == ((0, 0.0), (1, -9999.0))
    forced = sample(
        torch.tensor([0.0, -torch.inf, -1e30]), replace(GREEDY, logit_bias={2: 1e31}, logprobs=0), 0, [], []
    )
    assert (forced.token, forced.logprob) == (2, -9999.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("how", [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=1, top_p=0.5)])
def test_non_finite_logits_raise_permanent_error(bad: float, how: SamplingParams) -> None:
    with pytest.raises(PermanentError, match="not finite"):
        sample(torch.tensor([0.0, bad]), how, 0, [], [])
    with pytest.raises(PermanentError, match="not finite"):
        sample(torch.full((4,), -torch.inf), GREEDY, 0, [], [])
    with pytest.raises(PermanentError, match="not finite"):
        sample(torch.tensor([0.0, -torch.inf]), how, 0, [], [], allowed=b"\x02")


def test_min_tokens_bans_end_and_bad_words_are_never_completed() -> None:
    how = replace(GREEDY, min_tokens=2, end_ids=(0,), bad_words=((3,), (1, 2)))
    given = torch.tensor([5.0, 1.0, 3.0, 9.0, 2.0])
    assert [sample(given, how, 0, [], made).token for made in ([], [1], [1, 4], [4, 1])] == [2, 4, 0, 0]
    assert banned(how, [1]) == {0, 2, 3} and banned(how, [1, 4]) == {3}


def test_grammar_takes_precedence_over_min_tokens() -> None:
    how = replace(GREEDY, min_tokens=2, end_ids=(0, 999))
    assert sample(torch.tensor([5.0, 1.0]), how, 0, [], [], allowed=b"\x01").token == 0
    assert sample(torch.tensor([5.0, 1.0]), how, 0, [], [], allowed=b"\x03").token == 1


@pytest.mark.row("C5:continue_final_message")
def test_request_parameters_reach_stop_conditions() -> None:
    limits: dict[str, float] = {"max_tokens": 100, "vocabulary": 50}
    card = ModelSpec("m", "m", "language", Pipeline(()), limits, {}, {}, {})
    asked = {"messages": [{"role": "user", "content": "hi"}], "skip_special_tokens": False}
    params, _ = check_request(card, asked, TEXT, tokens=PromptTokens(1, special_stops=[7]))
    found = ending(params, DerivedFacts(continues=True))
    assert (found.continues, found.keep_special, found.stop_ids) == (True, True, {7})


@pytest.mark.row("C5:ignore_eos")
def test_ignore_eos_has_no_effect_with_grammar() -> None:
    """Given ignore_eos, which has nothing to go on with behind the end of a grammar."""
    asked = {"stop": "[]", "ignore_eos": True}
    assert ending(asked, DerivedFacts()).ignore_eos and not ending(asked, DerivedFacts(grammar="x")).ignore_eos


MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8, seed=1),
    SamplingParams(seed=2, logprobs=3),
    SamplingParams(temperature=1.3, min_p=0.05, repetition_penalty=1.2, seed=3),
    SamplingParams(temperature=0, logprobs=0, logit_bias={7: 30.0}),
    SamplingParams(frequency_penalty=0.5, presence_penalty=-0.3, bad_words=((9, 4),), min_tokens=9, end_ids=(2,)),
]


def next_token(index: int, how: SamplingParams) -> NextToken:
    return NextToken(logits(seed=index), how, 10 + index, PROMPT, MADE, None)


def test_texts_sampled_together_get_their_own_tokens() -> None:
    """Whatever is asked for each; also as rows of one computation, as on a GPU."""
    texts = [next_token(index, how) for index, how in enumerate(MIXED)]
    alone = [sample(text.logits, text.params, text.position, PROMPT, MADE) for text in texts]
    assert sample_all(texts) == alone
    assert sample_all(texts) == alone


@st.composite
def next_tokens(draw: st.DrawFn) -> list[NextToken]:
    """Texts of one step, each sampled in its own way. Some of their logits are equal."""
    vocabulary = draw(st.sampled_from([12, 300]))
    ids = st.lists(st.integers(0, 11), max_size=9)
    params = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.4, 1.0, 1.8]),
        top_k=st.sampled_from([0, 1, 4, 50, 1000]),
        top_p=st.sampled_from([1.0, 0.0, 0.3, 0.9, 1 - 2**-53]),
        min_p=st.sampled_from([0.0, 0.05, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.4, 0.6]),
        frequency_penalty=st.sampled_from([0.0, 0.7]),
        presence_penalty=st.sampled_from([0.0, -0.4]),
        logit_bias=st.dictionaries(st.integers(0, 11), st.floats(-9, 9), max_size=3),
        seed=st.integers(0, 1 << 40),
        logprobs=st.sampled_from([None, 0, 2, 20]),
        min_tokens=st.sampled_from([0, 5]),
        end_ids=st.sampled_from([(), (2, 9999)]),
        bad_words=st.sampled_from([(), ((4,), (1, 2))]),
    )
    allowed = st.none() | st.integers(1, (1 << vocabulary) - 1).map(lambda mask: mask.to_bytes(64, "little"))
    return [
        NextToken(
            row.round() if draw(st.booleans()) else row,
            draw(params),
            draw(st.integers(0, 1 << 20)),
            draw(ids),
            draw(ids),
            draw(allowed),
        )
        for row in logits(vocabulary * draw(st.integers(1, 6)), draw(st.integers(0, 99))).split(vocabulary)
    ]


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(next_tokens(), st.sampled_from([sampling.ROWS_BYTES, 8 * 12 * 2]))
def test_texts_in_rows_get_the_tokens_that_they_get_alone(texts: list[NextToken], rows_bytes: int) -> None:
    """Those of equal logits may be listed in another order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "CPU_ROWS_BYTES", 0)
        alone = sample_all(texts)
        patch.setattr(sampling, "CPU_ROWS_BYTES", rows_bytes)
        together = sample_all(texts)

    for own, row in zip(alone, together, strict=True):
        assert isinstance(own, SampledToken) and isinstance(row, SampledToken)
        assert (row.token, row.logprob) == (own.token, pytest.approx(own.logprob))
        assert [logprob for _, logprob in row.top] == pytest.approx([logprob for _, logprob in own.top])


def test_error_of_one_text_leaves_the_others_their_tokens() -> None:
    good = next_token(0, MIXED[2])
    broken = replace_logits(good, torch.full((500,), torch.nan))
    refused = NextToken(good.logits, MIXED[0], 3, PROMPT, MADE, bytes(63))
    first, second, third = sample_all([broken, good, refused])
    assert isinstance(first, PermanentError)
    assert "not finite" in str(first)
    assert second == sample(good.logits, good.params, good.position, PROMPT, MADE)
    assert isinstance(third, PermanentError)
    assert "the grammar allows only tokens" in str(third)
    assert sample_all([]) == []


def replace_logits(text: NextToken, other: torch.Tensor) -> NextToken:
    return NextToken(other, text.params, text.position, text.prompt_ids, text.output_ids, text.allowed)


def test_all_results_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all texts: each read waits for a GPU."""
    reads: list[str] = []
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "cpu", "numpy"):
        original = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *args: object, name: str = name, original: object = original) -> object:
            reads.append(name)
            return original(tensor, *args)  # type: ignore[operator]

        monkeypatch.setattr(torch.Tensor, name, read)
    sample_all([next_token(index, how) for index, how in enumerate(MIXED) if how.top_p == 1])
    assert reads == ["tolist"]


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 2**62)), min_size=1, max_size=4))
def test_draw_is_scaled_as_by_whole_numbers_of_any_size(pairs: list[tuple[int, int]]) -> None:
    chances, totals = zip(*pairs, strict=True)
    scaled = scaled_chances(chances, torch.tensor(totals)[:, None])
    assert scaled[:, 0].tolist() == [chance * total >> 64 for chance, total in pairs]


@pytest.mark.parametrize("total", [1, 2**22, 2**44 - 1, 2**58, 2**62])
def test_largest_draw_stays_below_the_total(total: int) -> None:
    assert int(scaled_chances([2**64 - 1], torch.tensor([[total]]))) == (2**64 - 1) * total >> 64
