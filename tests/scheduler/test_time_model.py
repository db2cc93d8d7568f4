"""The time model: what it recovers, what it resists, what it never does, whatever was measured."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from tests.examples import examples
from unfuse.scheduler.costs import EACH, SIZES, TimeModel, Work

FORWARDS = (5, 10, 20, 40, 80)
AREAS = [float(side * side * frames) for side in (32, 48, 64, 96, 128) for frames in (1, 5, 9)]
HELD_OUT = [float(side * side * frames) for side in (40, 56, 80, 112) for frames in (1, 3, 7)]

seconds = st.floats(1e-6, 1e5)
works = st.tuples(st.floats(1, 200), st.floats(1, 1e9))
measured = st.lists(st.tuples(works, seconds), min_size=1, max_size=30)


def linear(work: Work) -> float:
    return 0.05 + work[0] * (0.004 + 3e-7 * work[1])


def quadratic(work: Work) -> float:
    """At the largest area half of a forward is attention."""
    return 0.05 + work[0] * (0.002 + 3e-7 * work[1] + 2e-12 * work[1] ** 2)


def learned(
    time_model: TimeModel, truth: object, dice: random.Random, noise: float, times: int = 60, outliers: int = 0
) -> TimeModel:
    assert callable(truth)
    odd = set(dice.sample(range(times), outliers))
    for number in range(times):
        work = float(dice.choice(FORWARDS)), dice.choice(AREAS)
        time_model.add(work, truth(work) * dice.lognormvariate(0, noise) * (20 if number in odd else 1))
    return time_model


def off(time_model: TimeModel, truth: object) -> float:
    """The median of relative errors where nothing was measured."""
    assert callable(truth)
    works = [(float(forwards), area) for forwards in (7, 15, 30, 60) for area in HELD_OUT]
    errors = sorted(abs(time_model.seconds(work) / truth(work) - 1) for work in works)
    return errors[len(errors) // 2]


@pytest.mark.parametrize("truth", [linear, quadratic])
@pytest.mark.parametrize("seed", range(3))
def test_predictions_generalize_to_unmeasured_sizes(truth: object, seed: int) -> None:
    assert off(learned(TimeModel(), truth, random.Random(seed), noise=0.1), truth) < 0.06


@pytest.mark.parametrize("seed", range(3))
def test_quadratic_cost_is_distinguished_from_a_constant_rate(seed: int) -> None:
    time_model = learned(TimeModel(), quadratic, random.Random(seed), noise=0.0)
    small, large = (20.0, AREAS[0]), (20.0, max(AREAS))
    rate = quadratic(small) / small[1]
    assert time_model.seconds(small) == pytest.approx(quadratic(small), rel=0.1)
    assert time_model.seconds(large) == pytest.approx(quadratic(large), rel=0.1)
    assert not 0.5 < large[1] * rate / quadratic(large) < 2


@pytest.mark.parametrize("outliers", [1, 6])
def test_outliers_have_little_effect_on_predictions(outliers: int) -> None:
    time_model = learned(TimeModel(), linear, random.Random(1), noise=0.1, outliers=outliers)
    assert off(time_model, linear) < 0.08


def test_cold_start_measurement_is_superseded_by_the_next_one() -> None:
    time_model = TimeModel()
    time_model.add((20.0, 4096.0), 20.0)
    assert time_model.seconds((20.0, 4096.0)) == pytest.approx(20.0)
    time_model.add((20.0, 4096.0), 1.0)
    assert time_model.seconds((20.0, 4096.0)) == pytest.approx(1.0)
    time_model.add((40.0, 4096.0), 2.0)
    assert time_model.seconds((10.0, 4096.0)) == pytest.approx(0.5)


@given(work=works, took=seconds, more=st.floats(1, 100))
def test_a_single_measurement_is_scaled_in_proportion(work: Work, took: float, more: float) -> None:
    time_model = TimeModel()
    time_model.add(work, took)
    assert time_model.seconds((work[0] * more, work[1])) == pytest.approx(took * more, rel=1e-3)
    assert time_model.seconds((work[0], work[1] * more)) == pytest.approx(took * more, rel=1e-3)


def test_constant_time_across_sizes_is_learned() -> None:
    time_model = TimeModel()
    for size in (100.0, 800.0):
        for _ in range(3):
            time_model.add((2.0, size), 1.0)
    assert time_model.seconds((2.0, 400.0)) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_distant_size_is_scaled_proportionally_from_noisy_near_sizes(seed: int) -> None:
    time_model, dice = TimeModel(), random.Random(seed)
    for _ in range(40):
        for area in (64 * 64.0, 64 * 72.0):
            time_model.add((40.0, area), 40 * area * 1e-6 * dice.lognormvariate(0, 0.1))
    far = 40 * 1024 * 1024 * 1e-6
    assert 0.4 * far < time_model.seconds((40.0, 1024 * 1024.0)) < 2.5 * far


def test_many_measurements_of_one_size_do_not_displace_other_sizes() -> None:
    time_model = learned(TimeModel(), linear, random.Random(2), noise=0.0)
    for _ in range(200):
        time_model.add((40.0, 4096.0), linear((40.0, 4096.0)))
    assert off(time_model, linear) < 0.1


def test_speedup_is_learned_for_the_measured_size_and_then_for_others() -> None:
    time_model, dice = learned(TimeModel(), linear, random.Random(3), noise=0.05), random.Random(4)
    work, larger = (20.0, 64.0 * 64), (20.0, 128.0 * 128)
    for number in range(600):
        time_model.add(work, linear(work) / 4 * dice.lognormvariate(0, 0.05))
        if number == 60:
            assert time_model.seconds(work) < linear(work) / 2
    assert time_model.seconds(work) == pytest.approx(linear(work) / 4, rel=0.15)
    assert time_model.seconds(larger) == pytest.approx(4 * time_model.seconds(work), rel=0.1)


@settings(max_examples=examples(30))
@given(measured, works, st.floats(1, 100), st.floats(1, 100))
def test_predictions_are_monotonic_in_work(
    found: list[tuple[Work, float]], work: Work, forwards: float, size: float
) -> None:
    time_model = TimeModel()
    for one, took in found:
        time_model.add(one, took)
    here, there = time_model.seconds(work), time_model.seconds((work[0] * forwards, work[1] * size))
    assert 0 <= here <= there < float("inf")


@settings(max_examples=examples(30))
@given(measured)
def test_restored_time_model_predicts_the_same(found: list[tuple[Work, float]]) -> None:
    time_model = TimeModel()
    for work, took in found[:8]:
        time_model.add(work, took)
    again = TimeModel(time_model.times.items())
    for work, _ in found:
        assert again.seconds(work) == pytest.approx(time_model.seconds(work), rel=1e-9)


def test_time_model_retains_a_bounded_number_of_newest_measurements() -> None:
    time_model = TimeModel()
    for number in range(3 * SIZES):
        for took in range(1, 3 * EACH):
            time_model.add((1.0, 1.0 + number), float(took))
    assert [work[1] for work in time_model.times] == [1.0 + number for number in range(2 * SIZES, 3 * SIZES)]
    assert {tuple(took for _, took in times) for times in time_model.times.values()} == {
        tuple(float(took) for took in range(2 * EACH, 3 * EACH))
    }


def test_pending_measurements_are_applied_by_the_next_fit() -> None:
    time_model = TimeModel()
    for _ in range(100):
        time_model.add((1.0, 1.0), 1.0)
    assert time_model.seconds((1.0, 1.0)) == pytest.approx(1.0)
    for _ in range(EACH):
        time_model.add((1.0, 1.0), 2.0)
    time_model.fit()
    assert time_model.seconds((1.0, 1.0)) == pytest.approx(2.0)
