"""What is imported before compute processes are forked."""

from __future__ import annotations

import logging

import pytest

from unfuse.worker import fork_server


def test_library_warnings_during_import_are_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def imported(name: str) -> None:
        logging.getLogger("some.library").warning("an optional part cannot be loaded")
        logging.getLogger("some.library").error("it is broken")

    monkeypatch.setattr(fork_server, "import_module", imported)
    monkeypatch.setattr("gc.freeze", lambda: None)
    fork_server.import_for([])
    assert caplog.messages == ["it is broken"]
    logging.getLogger("some.library").warning("later")
    assert caplog.messages[1:] == ["later"]


def test_warnings_are_logged_again_after_imports_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str) -> None:
        raise ImportError("no such part")

    monkeypatch.setattr(fork_server, "import_module", broken)
    assert "no such part" in fork_server.import_for([])
    logging.getLogger("some.library").warning("later")
    assert caplog.messages == ["later"]
