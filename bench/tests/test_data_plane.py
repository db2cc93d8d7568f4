"""The benches of the data plane stay runnable, at tiny sizes. What they measure is not asserted."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from bench import blocks, narrow, pull, recovery, stores, tokens
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


def test_a_transfer_that_fails_goes_on_with_the_owners_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut, by another engine, with a wrong bit, and from an owner that is stopped until it is given up."""
    monkeypatch.setattr(pull, "EACH", MIB)
    reader = pull.Reader(["tcp", "zmq"], 32 * MIB)
    fast = replace(pull.OPTIONS, heartbeat_s=0.2)
    found = recovery.measure(reader, (4,), 1, options=fast)
    reader.close()

    assert found.keys() == {f"4K, {fault}" for fault in recovery.ENGINES}
    assert all(row["MiB"] == 28 and row["going on after, ms"] > 0 for row in found.values())
    assert all(0 <= row["came twice, MiB"] < 5 for row in found.values()), "a chunk at most comes twice"
    assert found[f"4K, {recovery.SILENT}"]["going on after, ms"] >= fast.silence_s * 1e3


def test_a_narrowed_edge_is_timed_and_its_error_seen() -> None:
    found = narrow.transfers((1,), (0,), 1, width=64)

    sizes = {name.rpartition(" ")[2]: (row["MiB"], row["largest error"]) for name, row in found.items()}
    assert [*sizes] == [*narrow.ENCODINGS]
    assert sizes["none"] == (0.2, 0.0) and sizes["fp16"][0] == sizes["bf16"][0] == 0.1
    assert 0 < sizes["fp16"][1] < sizes["bf16"][1] < sizes["int4"][1] < 1


def test_texts_are_compared_until_they_differ() -> None:
    plain = [[("a", -1.0), ("b", -2.0)], [("c", -1.0), ("d", -1.0)]]
    other = [[("a", -1.5), ("b", -2.0)], [("c", -1.0), ("x", -9.0)]]

    found = narrow.compared(plain, other)

    assert found["equal texts"] == "1 of 2" and found["tokens until another one"] == "75%"
    assert found["mean error of their log probability"] == pytest.approx(0.5 / 3, abs=1e-4)
