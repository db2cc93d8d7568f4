"""`make gpu` without a GPU: pieces that end, fail and take too long; and those that no other test runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_exact, gpu_run
from bench.gpu import PARTS, SERVER_PARTS, SUBJECT_PARTS
from bench.gpu_models import REAL
from bench.gpu_pieces import GROUPS, Piece, pieces
from tools import tiny

RECORDS = ["-c", "from bench.gpu_log import record; record('rate', figure=3)"]
FAILS = ["-c", "print('why'); raise SystemExit(3)"]
NEVER_ENDS = ["-c", "import time; time.sleep(3600)"]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs pieces as `make gpu` does; returns how it ends, and the lines of the log."""
    log = tmp_path / "gpu.jsonl"

    def started(selected: list[Piece], *options: str) -> tuple[object, list[dict[str, Any]]]:
        monkeypatch.setattr(gpu_run, "pieces", lambda device, tiny: selected)
        monkeypatch.setattr(gpu_run, "PACKAGES", ())
        monkeypatch.setattr(gpu_run, "START_S", 0.0)
        monkeypatch.setattr(sys, "argv", ["gpu_run", "--log", str(log), *options])
        with pytest.raises(SystemExit) as ended:
            gpu_run.main()
        return ended.value.code, [*map(json.loads, log.read_text().splitlines())] if log.exists() else []

    return started


@pytest.mark.slow
def test_facts_are_logged_as_they_come_and_ended_pieces_do_not_run_again(start: Any) -> None:
    code, lines = start([Piece("one", RECORDS)])
    assert code == 0
    assert lines[0] == {"piece": "one", "fact": "rate", "figure": 3}
    assert (lines[1]["piece"], lines[1]["exit"]) == ("one", 0)

    code, lines = start([Piece("one", FAILS), Piece("two", RECORDS)])
    assert (code, [line["piece"] for line in lines if "exit" in line]) == (0, ["one", "two"])


@pytest.mark.slow
def test_failed_piece_is_logged_with_its_output_and_the_next_one_runs(start: Any) -> None:
    code, lines = start([Piece("bad", FAILS), Piece("good", RECORDS)])
    assert code == 1
    assert [(line["piece"], line["exit"]) for line in lines if "exit" in line] == [("bad", 3), ("good", 0)]
    assert lines[0]["output"] == "why\n"


@pytest.mark.slow
def test_piece_beyond_its_limit_has_ended_and_one_that_was_cut_off_has_not(start: Any) -> None:
    code, lines = start([Piece("long", NEVER_ENDS, 0.5), Piece("cut", NEVER_ENDS, 3600.0)], "--within", "3")
    assert code == 1
    assert lines == [{"piece": "long", "exit": None, "output": "did not end within 0.5 s"}]


def test_missing_packages_are_named_and_pieces_that_need_them_are_skipped(
    start: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start([Piece("needs", RECORDS, packages=("no_such_package",))])
    assert "needs: skipped, since this Python lacks no_such_package" in capsys.readouterr().err

    monkeypatch.setattr(gpu_run, "PACKAGES", ("no_such_package",))
    monkeypatch.setattr(sys, "argv", ["gpu_run"])
    with pytest.raises(SystemExit, match=r"lacks no_such_package: bring their wheels"):
        gpu_run.main()


def test_list_imports_nothing_that_another_machine_may_lack() -> None:
    blocked = "import sys; sys.modules |= dict.fromkeys(['torch', 'PIL', 'diffusers', 'msgspec', 'numpy'])"
    program = f"{blocked}; sys.argv = ['x', '--list']; from bench.gpu_run import main; main()"
    listing = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert len(listing.splitlines()) == len(pieces("cuda:0", False))


def test_every_part_is_a_piece_of_at_most_90_seconds() -> None:
    of_device = pieces("cuda:0", False)
    assert max(piece.seconds for piece in of_device) <= 90
    assert len({piece.name for piece in of_device}) == len(of_device)
    parts = {piece.name.split()[0] for piece in of_device}
    assert {*PARTS, *SUBJECT_PARTS, *SERVER_PARTS} <= parts
    assert [kind for group in GROUPS for kind in group] == [*tiny.KINDS]


def test_models_have_the_widths_of_the_published_ones() -> None:
    """With all their blocks, they have as many million parameters."""
    published = {
        "flux": {"text_encoder": ((), 123), "text_encoder_2": ((24,), 4762), "transformer": ((19, 38), 11901)},
        "wan": {"text_encoder": ((24,), 5681), "transformer": ((30,), 1419)},
    }
    vaes = {"flux": 84, "wan": 127}
    for kind, components in published.items():
        for name, (blocks, millions) in {**components, "vae": ((), vaes[kind])}.items():
            with torch.device("meta"):
                model: Any = REAL[kind].components[name](*blocks)  # type: ignore[call-arg]
            assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions, name


def test_products_of_rows_that_do_not_fill_a_tile_are_those_of_the_plain_product() -> None:
    drawn = torch.Generator().manual_seed(1)
    requests, weight = torch.randn(3, 333, 16, generator=drawn), torch.randn(16, 24, generator=drawn)
    plain = torch.einsum("ntw,wo->nto", requests, weight)

    for name, product in gpu_exact.WAYS.items():
        torch.testing.assert_close(product(requests, weight), plain, msg=name)

    found = gpu_exact.products("cpu", {"16 to 24": (16, 24)}, times=1)
    assert {row["sizes_with_equal_bytes"] for name, row in found.items() if "each by itself" in name} == {"8 of 8"}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["facts", pytest.param("steps flux", marks=pytest.mark.nightly)])
def test_part_runs_on_a_cpu_with_tiny_models(part: str, tmp_path: Path) -> None:
    command = ["-m", "bench.gpu", "--device", "cpu", "--tiny", "--folder", str(tmp_path), *part.split()]
    output = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True).stdout
    facts = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert facts and not [fact for fact in facts if "failed" in fact]


@pytest.mark.nightly
@pytest.mark.parametrize("piece", pieces("cpu", True), ids=lambda piece: piece.name)
def test_every_piece_runs_on_a_cpu_with_tiny_models(piece: Piece, start: Any) -> None:
    code, lines = start([Piece(piece.name, piece.command, 900.0)], "--tiny", "--within", "900")
    assert code == 0, lines[-1]


@pytest.mark.slow
def test_verdicts_name_every_stage_that_shares_forwards(tmp_path: Path) -> None:
    found = gpu_exact.families(tmp_path, "cpu", ("flux",))

    assert json.loads(json.dumps(found)).keys() == {"flux, float32", "flux, bfloat16"}
    sizes = {f"{stage}, {size}" for stage in ("text_encode", "text_encode_2", "denoise") for size in (2, 4, 8)}
    assert all(sizes <= verdicts.keys() and {*verdicts.values()} == {"equal"} for verdicts in found.values()), found
