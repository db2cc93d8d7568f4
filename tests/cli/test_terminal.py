"""What is said of standard error on a command line."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Run


@pytest.mark.parametrize(
    "arguments", [["--log-level", "debug", "config", "show"], ["config", "show", "--log-level", "debug"]]
)
def test_log_level_is_accepted_before_and_after_the_subcommand(unfuse: Run, arguments: list[str]) -> None:
    rows = {row["setting"]: row for row in json.loads(unfuse(*arguments, "--json")[1])}
    assert (rows["log.level"]["value"], rows["log.level"]["from"]) == ("debug", "flag --log-level")
    assert (rows["log.format"]["flag"], rows["log.format"]["environment"]) == ("--log-format", "UNFUSE_LOG__FORMAT")


def test_unknown_log_level_exits_2(unfuse: Run) -> None:
    code, _, err = unfuse("--log-level", "loud", "config", "show")
    assert code == 2
    assert "'debug'" in err
