"""Two checkouts are compared in turns, and only what is one is measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import against
from bench.against import ROOT, checked, in_turns, of_servers, row


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    assert checked(ROOT) == ROOT
    with pytest.raises(SystemExit, match=f"{tmp_path} is not a checkout of unfuse: unfuse is imported from"):
        checked(tmp_path)


def test_each_is_first_in_every_other_pair_and_those_that_warm_up_do_not_count() -> None:
    order = list[str]()

    def side(name: str, costs: float) -> dict[str, float]:
        order.append(name)
        return {"cpu": costs * len(order), "wall": 1.0}

    found = in_turns({"old": lambda: side("old", 1), "new": lambda: side("new", 2)}, 2, 1)

    assert order == ["new", "old", "old", "new", "new", "old"]
    assert found == {
        "old": [{"cpu": 3, "wall": 1.0}, {"cpu": 6, "wall": 1.0}],
        "new": [{"cpu": 8, "wall": 1.0}, {"cpu": 10, "wall": 1.0}],
    }
    assert row(found)["cpu, old, ms"] == 4500


def test_every_few_pairs_have_new_servers_which_start_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[list[str]]()

    @contextmanager
    def serve(checkouts: Mapping[str, Path], *arguments: str) -> Iterator[dict[str, int]]:
        started.append([*checkouts])
        yield dict.fromkeys(checkouts, len(started))

    monkeypatch.setattr(against, "both_serve", serve)
    checkouts = {"old": Path("old"), "new": Path("new")}

    found = of_servers(checkouts, 5, [], lambda server: lambda: {"cpu": float(server)})

    assert started == [["new", "old"], ["old", "new"]]
    assert [one["cpu"] for one in found["new"]] == [1, 1, 1, 2, 2]


def test_the_ratio_is_the_median_of_pairs() -> None:
    one = [{"cpu": cost, "wall": 1.0} for cost in (1.0, 2.0, 4.0)]
    other = [{"cpu": cost, "wall": 1.0} for cost in (1.1, 2.4, 4.4)]

    assert row({"old": one, "new": other})["cpu, new ÷ old"] == 1.1
