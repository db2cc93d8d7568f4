"""The benches of the data plane stay runnable, at tiny sizes. What they measure is not asserted."""

from pathlib import Path

from bench import blocks, stores


def test_allocators_are_compared_over_one_trace() -> None:
    assert list(blocks.trace(50, 512, 1.0)) == list(blocks.trace(50, 512, 1.0))
    found = blocks.measure(300)
    assert set(found) == set(blocks.MIXES)
    for mix in found.values():
        assert isinstance(mix, dict) and mix["blocks"]["mean_MiB"] < mix["fixed"]["mean_MiB"]


def test_a_space_that_is_never_freed_would_be_seen() -> None:
    events = [(1.0, 2.0, 100), (3.0, 5.0, 100), (4.0, 6.0, 100)]
    block, whole = blocks.BLOCK * blocks.TOKEN, 2 * blocks.BLOCK * blocks.TOKEN
    found = blocks.play(blocks.Blocks(10 * whole, block), events)
    assert found["peak_MiB"] == round(2 * whole / 2**20, 1)
    assert found["mean_MiB"] == round(2 * whole / 4 / 2**20, 1), "one for a second, and one for the last, of four"


def test_stores_are_measured(tmp_path: Path) -> None:
    assert "ratio" in stores.puts((1 << 20,), 1)["1 MiB"]  # type: ignore[operator]
    assert stores.gets((4096, 8192), 3)["microseconds"]
    assert set(stores.spills(tmp_path, 1 << 20, 1)) == {"spill", "restore"}
