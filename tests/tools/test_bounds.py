"""Lower bounds of dependencies are versions; what is tested with the oldest ones, and when."""

from __future__ import annotations

import re

import pytest

from tools.bounds import COMPUTING, FIXED, LEFT_OUT, TESTS, allowed, as_tested, main, name_of, oldest
from tools.snippets import ROOT


def test_dependencies_have_pinnable_lower_bounds() -> None:
    for line in allowed():
        assert re.fullmatch(r"[\w-]+(\[\w+\])?==\d+(\.\d+)*", oldest(line)), line
    assert {"httpx2", "fastapi", "redis", "diffusers", "transformers"} <= {name_of(line) for line in allowed()}
    assert {name_of(line) for line in as_tested()} == FIXED == {"torch"}


def test_lower_bound_run_names_existing_test_files() -> None:
    assert all((ROOT / tests).exists() for tests in (*TESTS, *COMPUTING))
    for file, _, name in (option.removeprefix("--deselect=").partition("::") for option in LEFT_OUT):
        assert f"def {name}(" in (ROOT / file).read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_client_and_server_work_with_oldest_and_newest_dependencies(which: str) -> None:
    assert main(which) == 0
