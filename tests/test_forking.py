"""Forked processes begin and end as started ones do."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.forking import Forked

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys, time
print(sys.argv[1:], sorted(os.environ), os.getcwd(), os.getpid() == os.getsid(0), flush=True)
time.sleep(600) if sys.argv[1:] == ["sleep"] else sys.exit(7)
"""


@pytest.mark.parametrize(("argument", "code"), [("end", 7), ("sleep", -signal.SIGKILL)])
def test_forked_process_gets_its_environment_and_reports_its_exit_code(
    argument: str, code: int, tmp_path: Path
) -> None:
    (script := tmp_path / "script.py").write_text(SCRIPT)
    with (tmp_path / "log").open("wb") as log:
        forked = Forked(
            ["", str(script), argument],
            stdout=log.fileno(),
            stderr=log.fileno(),
            env={"ONLY": "this"},
            cwd=tmp_path,
            start_new_session=True,
            imports=("json",),
        )
    if argument == "sleep":
        assert forked.poll() is None
        forked.kill()
    else:
        forked.wait()
        assert (tmp_path / "log").read_text() == f"['end'] ['ONLY'] {tmp_path} True\n"
    assert forked.wait() == forked.returncode == code
