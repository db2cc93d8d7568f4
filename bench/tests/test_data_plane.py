"""The benches of the data plane stay runnable, at tiny sizes. What they measure is not asserted."""

from pathlib import Path

import pytest

from bench import blocks, pull, stores, tokens
from bench.report import table

MIB = 1 << 20


def test_allocators_are_compared_over_one_trace() -> None:
    assert list(blocks.trace(50, 512, 1.0)) == list(blocks.trace(50, 512, 1.0))
    found = blocks.measure(300)
    assert len(found) == len(blocks.MIXES)
    for rows in found.values():
        assert rows["blocks"]["mean MiB"] < rows["p90"]["mean MiB"] <= rows["fixed"]["mean MiB"]  # type: ignore[operator]


def test_a_space_that_is_never_freed_would_be_seen() -> None:
    events = [(1.0, 2.0, 100), (3.0, 5.0, 100), (4.0, 6.0, 100)]
    block, whole = blocks.BLOCK * blocks.TOKEN, 2 * blocks.BLOCK * blocks.TOKEN
    found = blocks.play(blocks.Blocks(10 * whole, block), events)
    assert found["peak MiB"] == round(2 * whole / MIB, 1)
    assert found["mean MiB"] == round(2 * whole / 4 / MIB, 1), "one for a second, and one for the last, of four"
    assert found["share in use"] == round(100 / 128, 3)


def test_room_by_recent_lengths_follows_them_and_grows_where_it_was_too_small() -> None:
    space = blocks.Recent(blocks.CAPACITY, 0.5)
    places = [space.allocate(tokens * blocks.TOKEN) for tokens in (100, 100, 100, 8000)]
    assert space.grown == 1, "only the last was longer than those before it"
    for place in places:
        space.free(place)
    space.allocate(blocks.TOKEN)
    assert space.usage().used == 2 * blocks.BLOCK * blocks.TOKEN, "room for 100 tokens"


def test_stores_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put = stores.puts((MIB,), 1)
    assert {"owner ÷ copy and hash", "writer ÷ copy and hash"} < set(put["1 MiB"])
    assert set(stores.gets((4096, 8192), 3)) == {"4 KiB", "8 KiB"}
    assert set(stores.spills(tmp_path, MIB, 1)) == {"spill", "restore"}
    table("put", put)
    head, rule, row = capsys.readouterr().out.split("\n")[1:4]
    assert head.count("|") == rule.count("|") == row.count("|") and row.startswith("| 1 MiB |")


def test_pulls_are_measured_against_the_plain_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "EACH", MIB)
    found = pull.measure(("tcp", "zmq"), 1, (1,), "none")
    assert list(found) == ["1 MiB", *(f"{number} × 1 MiB" for number in pull.AT_ONCE)]
    assert set(found["1 MiB"]["GB/s"]) == {"raw", "raw_checked", "pyzmq", "tcp", "zmq"}
    assert set(found["16 × 1 MiB"]["tcp_over"]) == {"raw", "the best"}


def test_what_comes_through_a_small_buffer_is_what_its_owner_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "EACH", MIB)
    reader = pull.Reader(["tcp"], 16 * MIB)
    assert tokens.transfers(reader, (1,), 1)["1K"]["MiB"] == 7
    (row,) = tokens.windows(reader, (2,), 1, 1).values()
    assert row["the same bytes"] is True
    assert row["resumes"] >= 1
    reader.close()
