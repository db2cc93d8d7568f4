"""What `make gpu` does, without a GPU: pieces that end, fail and take too long; and those that no other test runs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_exact, gpu_run

ENDS = ["-c", 'print(\'{"it": "ended"}\')']
FAILS = ["-c", "print('why'); raise SystemExit(3)"]
NEVER_ENDS = ["-c", "import time; print('{}', flush=True); time.sleep(3600)"]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs pieces as `make gpu` does; returns how it ends, and the log."""
    log = tmp_path / "gpu.jsonl"

    def started(pieces: dict[str, list[str]], *options: str) -> tuple[object, dict[str, dict[str, Any]]]:
        monkeypatch.setattr(gpu_run, "pieces", lambda: pieces)
        monkeypatch.setattr(sys, "argv", ["gpu_run", "--log", str(log), *options])
        with pytest.raises(SystemExit) as ended:
            gpu_run.main()
        return ended.value.code, gpu_run.done(log)

    return started


@pytest.mark.slow
def test_what_is_in_the_log_is_not_done_again(start: Any, tmp_path: Path) -> None:
    code, found = start({"one": ENDS})
    assert (code, found["one"]["figures"]) == (0, {"it": "ended"})

    code, found = start({"one": FAILS, "two": ENDS})
    assert (code, found.keys()) == (0, {"one", "two"})
    assert len((tmp_path / "gpu.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_a_piece_that_fails_is_said_and_does_not_stop_the_rest(start: Any) -> None:
    code, found = start({"bad": FAILS, "good": ENDS})

    assert code == 1 and found["bad"]["exit"] == 3 and found["bad"]["said"] == "why\n" and found["good"]["exit"] == 0


@pytest.mark.slow
def test_what_had_all_the_time_is_given_up_and_what_was_cut_short_is_not(start: Any) -> None:
    code, found = start({"long": NEVER_ENDS, "next": ENDS}, "--within", "2")
    assert code == 1 and found.keys() == {"long"} and "not done within 2 s" in found["long"]["said"]

    code, found = start(
        {"long": NEVER_ENDS, "late": ["-c", "import time; time.sleep(1); print('{}')"], "cut": NEVER_ENDS},
        "--within",
        "5",
    )
    assert found.keys() == {"long", "late"}


def test_every_part_of_every_model_is_a_piece() -> None:
    commands = [" ".join(command) for command in gpu_run.pieces().values()]

    assert len({*commands}) == len(commands) == 1 + 3 + 9 + 6
    assert all("-m gpu" in command or "--part" in command for command in commands)


def test_products_of_rows_that_do_not_fill_a_tile_are_those_of_the_plain_product() -> None:
    drawn = torch.Generator().manual_seed(1)
    requests, weight = torch.randn(3, 333, 16, generator=drawn), torch.randn(16, 24, generator=drawn)
    plain = torch.einsum("ntw,wo->nto", requests, weight)

    for name, product in gpu_exact.WAYS.items():
        torch.testing.assert_close(product(requests, weight), plain, msg=name)

    found = gpu_exact.products("cpu", {"16 to 24": (16, 24)}, times=1)
    assert {row["sizes_with_equal_bytes"] for name, row in found.items() if "each by itself" in name} == {"8 of 8"}


@pytest.mark.slow
def test_verdicts_name_every_stage_that_shares_forwards(tmp_path: Path) -> None:
    found = gpu_exact.families(tmp_path, "cpu", ("flux",))

    assert json.loads(json.dumps(found)).keys() == {"flux, float32", "flux, bfloat16"}
    sizes = {f"{stage}, {size}" for stage in ("text_encode", "text_encode_2", "denoise") for size in (2, 4, 8)}
    assert all(sizes <= verdicts.keys() and {*verdicts.values()} == {"equal"} for verdicts in found.values()), found
