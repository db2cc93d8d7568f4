"""What layouts gave when they were measured: kept by circumstances, and the layout is chosen by it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from unfuse.core.compute import ComputeOptions
from unfuse.core.errors import ConfigError
from unfuse.launch.placement import CPU, PROCESS, Device, Part, Wanted
from unfuse.models import card_of, resolve_source
from unfuse.service.comparison import measure_layouts
from unfuse.service.layout import Layouts, Means, layouts
from unfuse.service.plan import Plan
from unfuse.service.scaling import Scaling, circumstances

GIB = 1 << 30
CARD = card_of("unfuse/shapes", resolve_source("unfuse/shapes"))
NEEDS = {stage.role: (Part(stage.role, "float32", GIB, mapped=True),) for stage in CARD.pipeline.stages}
WHOLE = 3 * GIB
FIRST = frozenset({"denoiser"})
FIT = ("all=4", "all=3", "all=2", "all=1")
"""On four cores, in the order in which they are preferred where nothing was measured."""


@dataclass(frozen=True)
class Place:
    """Where models are to be served."""

    cores: int = 4
    host: int = 1 << 40
    threads: int = 0

    @property
    def wanted(self) -> Wanted:
        return Wanted(None, {}, ComputeOptions(threads=self.threads), auto=True, first=FIRST)

    @property
    def devices(self) -> tuple[Device, ...]:
        return (Device(CPU, self.host),)

    def found(self, file: Path | None) -> Layouts:
        return layouts([CARD], NEEDS, self.wanted, self.devices, Means(self.cores, scaling=file))

    def measured(self, file: Path, rates: dict[str, float]) -> None:
        Scaling(file).keep(circumstances([CARD], self.wanted.compute, self.devices, self.cores), rates)


def test_the_layout_that_gave_most_is_chosen_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "data" / "scaling.json"
    assert Place().found(file).chosen.workers == "all=4"
    Place().measured(file, {"all=4": 1.5, "all=2": 2.5, "all=1": 2.0})
    found = Place().found(file)
    assert found.chosen.workers == "all=2"
    most = "which gave most when measured here: 2.5 requests a second"
    assert found.why == f"layout all=2: each worker runs all stages, {most}"


@given(st.dictionaries(st.sampled_from(FIT), st.floats(0.01, 100.0)), st.integers(1, 4))
def test_of_those_that_fit_none_gave_a_twentieth_more(
    tmp_path_factory: pytest.TempPathFactory, rates: dict[str, float], most: int
) -> None:
    file = tmp_path_factory.mktemp("scaling") / "scaling.json"
    place = Place(host=WHOLE + most * PROCESS)
    place.measured(file, rates)
    fit = [name for name in FIT if int(name[-1]) <= most]
    known = {name: rates[name] for name in fit if name in rates}
    chosen = place.found(file).chosen
    assert chosen.workers in fit
    if known:
        assert chosen.gave == rates[chosen.workers] >= 0.95 * max(known.values()) - 1e-9
    else:
        assert chosen == Place(host=place.host).found(None).chosen, "as if nothing had been measured"


def test_of_equal_ones_that_is_chosen_that_would_be_without_measuring(tmp_path: Path) -> None:
    Place().measured(tmp_path / "some", {"all=4": 2.0, "all=2": 2.05, "all=1": 1.0})
    assert Place().found(tmp_path / "some").chosen.workers == "all=4"


@pytest.mark.parametrize("other", [Place(cores=8), Place(threads=2)])
def test_what_was_measured_elsewhere_says_nothing_here(tmp_path: Path, other: Place) -> None:
    other.measured(tmp_path / "some", {"all=1": 9.0})
    assert Place().found(tmp_path / "some").chosen.workers == "all=4"
    assert other.found(tmp_path / "some").chosen.workers == "all=1"


def test_other_weights_dtypes_and_devices_are_other_circumstances() -> None:
    def of(card: object = CARD, device: str = CPU) -> str:
        return circumstances([card], ComputeOptions(), [Device(device, GIB)], 4)  # type: ignore[list-item]

    weights = replace(CARD, weights=dict.fromkeys(CARD.weights, "others"))
    dtypes = replace(CARD, dtypes=dict.fromkeys(CARD.dtypes, "bfloat16"))
    assert len({of(), of(weights), of(dtypes), of(device="cuda:0")}) == 4
    assert of(replace(CARD, name="the same by another name")) == of()


def test_the_rates_of_others_stay_and_one_s_own_are_replaced(tmp_path: Path) -> None:
    kept = Scaling(tmp_path / "scaling.json")
    kept.keep("a", {"all=1": 1.0, "all=2": 2.0})
    kept.keep("b", {"all=1": 3.0})
    kept.keep("a", {"all=1": 4.0})
    assert (kept.of("a"), kept.of("b"), kept.of("c")) == ({"all=1": 4.0}, {"all=1": 3.0}, {})


@pytest.mark.parametrize("text", ["", "[]", '{"a": {"all=1": 0}}', '{"a": {"all=1": "1"}}', "\x00"])
def test_a_file_that_cannot_be_read_counts_as_empty_and_is_replaced(tmp_path: Path, text: str) -> None:
    file = tmp_path / "scaling.json"
    file.write_text(text)
    assert Scaling(file).of("a") == {}
    Scaling(file).keep("a", {"all=1": 1.0})
    assert Scaling(file).of("a") == {"all=1": 1.0}


def test_what_cannot_be_kept_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="what layouts give cannot be kept in .*: File exists"):
        Scaling(tmp_path / "file" / "scaling.json").keep("a", {"all=1": 1.0})


def test_measured_is_every_layout_of_whole_workers_that_fits_and_remembered_is_what_each_gave(tmp_path: Path) -> None:
    file, place, asked = tmp_path / "scaling.json", Place(host=WHOLE + 2 * PROCESS), list[str]()

    def measured(workers: str) -> float:
        asked.append(workers)
        return {"all=2": 1.0, "all=1": 3.0}[workers]

    plan = Plan((), NEEDS, place.wanted, place.devices, (), layouts=place.found(file))
    means = Means(place.cores, scaling=file)
    model = _Model(CARD)
    assert measure_layouts(replace(plan, models=(model,)), means, measured) == {"all=2": 1.0, "all=1": 3.0}  # type: ignore[arg-type]
    assert asked == ["all=2", "all=1"]
    assert place.found(file).chosen.workers == "all=1"


@dataclass(frozen=True)
class _Model:
    """A model of which only the card is asked for."""

    card: object


def test_where_nothing_is_chosen_nothing_is_measured() -> None:
    plan = Plan((), NEEDS, Place().wanted, Place().devices, ())
    with pytest.raises(ConfigError, match="leave out where workers run"):
        measure_layouts(plan, Means(), lambda workers: 1.0)
