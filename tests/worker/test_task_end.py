"""What a worker logs of the end of a task."""

from __future__ import annotations

from structlog.testing import capture_logs

from unfuse.core.messages import Failed
from unfuse.core.task import Claim
from unfuse.worker.worker import log_outcome


def test_what_is_handed_back_in_a_stop_is_no_failure() -> None:
    claim = Claim("req_0", "denoise", 1, b"secret")
    with capture_logs() as told:
        log_outcome(Failed(claim, "hand_back", "the worker leaves", reason="drain"))
        log_outcome(Failed(claim, "hand_back", "the worker cannot run it now", reason="compute"))
    assert [(one["event"], one["log_level"]) for one in told] == [
        ("task handed back", "info"),
        ("task failed", "warning"),
    ]
    assert "secret" not in str(told)
