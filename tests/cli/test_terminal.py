"""What is said of standard error on a command line."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Run


@pytest.mark.parametrize(
    "arguments", [["--log-level", "debug", "config", "show"], ["config", "show", "--log-level", "debug"]]
)
def test_a_level_may_stand_before_the_verb_or_behind_it(unfuse: Run, arguments: list[str]) -> None:
    rows = {row["setting"]: row for row in json.loads(unfuse(*arguments, "--json")[1])}
    assert (rows["log.level"]["value"], rows["log.level"]["from"]) == ("debug", "flag --log-level")
    assert (rows["log.format"]["flag"], rows["log.format"]["environment"]) == ("--log-format", "UNFUSE_LOG__FORMAT")


def test_a_level_that_is_none_is_exit_2(unfuse: Run) -> None:
    code, _, err = unfuse("--log-level", "loud", "config", "show")
    assert code == 2
    assert "'debug'" in err
