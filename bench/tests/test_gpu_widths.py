"""The comparison of models of real width, with narrow ones on a CPU."""

import json
import sys
from typing import Any

import pytest

from bench import gpu_widths
from bench.gpu_widths import SIZES


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the bench on a CPU with these options; returns the lines that it prints."""

    def run(*options: str) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["gpu_widths", "--device", "cpu", *options])
        gpu_widths.main()
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


@pytest.mark.slow
def test_requests_keep_their_bytes_by_the_rule_and_not_in_a_plain_forward(lines: Any) -> None:
    [found] = lines("--only", "sd3, ")
    assert [found["by the rule"][str(size)] for size in SIZES] == [*SIZES]
    assert [found["plain"][str(size)] for size in SIZES] != [*SIZES], "text is cut from pictures, so slices are strided"
