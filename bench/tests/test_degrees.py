"""What more ranks would give: measured, and predicted from that for other degrees."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from bench.degrees import SENT, Found, Step, advised, measure, predicted, rows_of
from tools.tiny import build
from unfuse.core.compute_options import PARALLEL_KINDS, SHARDING_KINDS, ParallelDegrees
from unfuse.models import read_model_spec, resolve_source

SHAPES = "unfuse/shapes"
CARD = read_model_spec(SHAPES, resolve_source(SHAPES))
seconds = st.floats(1e-3, 10.0)


def found(spread: str, alone: Step, step: Step, most: int = 8) -> list[Found]:
    parsed = ParallelDegrees.parse(spread)
    measured = Found("denoiser", spread, parsed.size, step, True)
    return [Found("denoiser", "", 1, alone, True), measured, *predicted(measured, alone, parsed, CARD, most)]


def test_every_kind_by_which_ranks_share_work_says_what_leaves_one() -> None:
    assert SENT.keys() == {*PARALLEL_KINDS} - {*SHARDING_KINDS}
    assert len(found("shard:2", Step(1.0), Step(1.0, 0.5))) == len(found("layers:2", Step(1.0), Step(0.5, 0.5))) == 2


@given(seconds, seconds, seconds, st.floats(0, 1))
def test_a_prediction_goes_through_what_was_measured(
    alone: float, compute: float, exchange: float, idle: float
) -> None:
    """Half of the degree computes twice as long, and from there back again is what it was."""
    step = Step(compute, exchange, exchange * idle)
    (two,) = (one for one in found("ulysses:4", Step(alone), step) if one.spread == "ulysses:2")
    assert two.step.compute_s == pytest.approx(2 * compute)
    sent = (exchange - step.least_s) * (1 / 4) / (3 / 16) + step.least_s / 3
    assert two.step.exchange_s == pytest.approx(sent)


def test_only_degrees_that_can_be_are_predicted() -> None:
    names = [one.spread for one in found("ulysses:2", Step(1.0), Step(0.6, 0.1))]
    assert names == ["", "ulysses:2", "ulysses:4"], "four heads"
    assert [one.spread for one in found("ring:2", Step(1.0), Step(0.6, 0.1))][2:] == ["ring:4", "ring:8"]
    assert [one.spread for one in found("ring:2", Step(1.0), Step(0.6, 0.1), most=2)][2:] == []
    assert [one.spread for one in found("cfg:2", Step(1.0), Step(0.6, 0.1))][2:] == []
    assert len(found("ulysses:2+cfg:2", Step(1.0), Step(0.3, 0.1))) == 2, "a product is only measured"


def test_it_says_what_has_the_shortest_step_and_where_more_ranks_are_slower() -> None:
    waits = found("ring:2", Step(1.0), Step(0.6, 0.2, 0.2))
    assert [*advised(waits)] == [
        "denoiser: --parallel denoiser=ring:2 has the shortest step; more ranks are slower (ring:4, ring:8)"
    ]
    assert [*advised(found("ring:2", Step(1.0), Step(0.9, 0.2)))][0].startswith("denoiser: --parallel denoiser=ring:8")
    slower = found("ulysses:2", Step(0.1), Step(0.09, 0.2, 0.2), most=2)
    assert [*advised(slower)] == ["denoiser: one rank is fastest; more ranks are slower (ulysses:2)"]
    assert [row["gain"] for row in rows_of(slower)] == [1.0, 0.34]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "role", "how"),
    [
        ("", "denoiser", "ring:2"),
        ("wan-image", "encoder", "tiles:2"),
    ],
)
def test_what_is_asked_for_is_measured_beside_one_rank(kind: str, role: str, how: str, tmp_path: Path) -> None:
    model = str(build(kind, tmp_path / kind)) if kind else SHAPES
    one, two, *more = rows_of(measure(model, f"{role}={how}", 0))
    assert (one["spread"], one["how"], one["exchange_s"]) == ("one rank", "measured", 0)
    assert (two["spread"], two["how"]) == (how, "measured")
    assert two["step_s"] == pytest.approx(two["compute_s"] + two["exchange_s"], abs=2e-4)
    assert two["exchange_s"] > 0
    assert all(row["how"] == "predicted" for row in more)
