"""What was once answered is answered still, byte for byte, where the processor and the libraries are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.recorded import RECORDED, REQUESTS, answers, circumstances, server_of_all


def test_ten_recorded_requests_return_identical_bytes(tmp_path: Path) -> None:
    recorded = json.loads(RECORDED.read_text())
    here, there = circumstances(), recorded["circumstances"]
    if here != there:
        other = {name: f"{there[name]} there, {here[name]} here" for name in here if here[name] != there[name]}
        pytest.skip(f"recorded under other circumstances: {other}")

    with server_of_all(tmp_path) as server:
        found = answers(server)

    changed = [request for request, was, is_ in zip(REQUESTS, recorded["results"], found, strict=True) if was != is_]
    assert changed == []
    assert all(recorded["results"])
