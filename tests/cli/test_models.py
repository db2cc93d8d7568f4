"""`unfuse models`: what is listed, and models that are added and removed at a running server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.cli.conftest import Run
from tests.server.composed import composed
from unfuse.cli.models import _state as state_of, _waits_for as waits_for
from unfuse.client import Client
from unfuse.core.errors import InvalidParameter
from unfuse.models import resolve_source

SHAPES = str(resolve_source("unfuse/shapes"))


@pytest.fixture
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that ends with the test: behind it, its log would be on standard output."""
    with capture_logs(), composed(tmp_path_factory.mktemp("served")) as port:
        yield f"http://127.0.0.1:{port}"


def test_a_model_is_added_listed_and_removed(
    unfuse: Run, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a folder beside us, when it is added by a relative path, then the server is told where it is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").symlink_to(SHAPES)
    code, out, _ = unfuse("models", "add", "mine", "--no-wait", "--server", url)
    assert (code, out) == (0, "mine is loading\n")
    code, out, err = unfuse("models", "add", "mine", "--server", url)
    assert (code, out) == (1, "") and "a model 'mine' is served already: send another name" in err
    assert unfuse("models", "add", "mine", "--name", "../mine", "--server", url)[0] == 2
    added = json.loads(unfuse("models", "add", "mine", "--name", "other", "--no-wait", "--json", "--server", url)[1])
    assert (added["id"], added["state"]) == ("other", "loading")
    for verb in (["models"], ["models", "ls"]):
        rows = {row["id"]: row for row in json.loads(unfuse(*verb, "--json", "--server", url)[1])}
        assert {rows[name]["state"] for name in ("unfuse/shapes", "mine", "other")} == {"loading"}
        assert [name for name, row in rows.items() if row.get("default")] == ["unfuse/shapes"]
        assert re.search("^unfuse/shapes +loading +yes", unfuse(*verb, "--server", url)[1], re.MULTILINE)
    code, out, _ = unfuse("models", "rm", "mine", "--server", url)
    assert (code, out) == (0, "mine is removed; accepted requests will still be completed\n")
    assert json.loads(unfuse("models", "rm", "other", "--json", "--server", url)[1])["deleted"]
    code, out, err = unfuse("models", "rm", "mine", "--server", url)
    assert (code, out) == (2, "") and "model 'mine' is not served" in err


LOADING = {"phase": "loading", "done": 1 << 20, "total": 3 << 20}


@pytest.mark.parametrize(
    ("last", "code", "says"),
    [
        ({"state": "ready", "reason": None}, 0, "flux is ready\n"),
        ({"state": "failed", "reason": "no room"}, 1, "model flux cannot be served: no room\n"),
    ],
)
def test_models_add_waits_and_reports_progress_or_failure(
    last: dict[str, Any], code: int, says: str, unfuse: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [{"state": "loading", "reason": None, "progress": LOADING}, last]
    first = {"id": "flux", "state": "loading", "reason": None, "progress": LOADING}
    monkeypatch.setattr("unfuse.cli.models.CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr(Client, "add_model", lambda self, model, name: first)
    monkeypatch.setattr(Client, "model", lambda self, name: {"id": name, "progress": None, **states.pop(0)})
    found, out, err = unfuse("models", "add", "/models/flux", "--server", "http://127.0.0.1:1")
    assert found == code and says in (out if code == 0 else err)
    assert "inspecting /models/flux" in err and not states


def test_models_add_error_names_the_given_path(unfuse: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's sentence has the model's name alone, since answers have no paths."""

    def refuse(self: Client, model: str, name: str | None) -> dict[str, Any]:
        raise InvalidParameter("model 'flux': there is no such folder or file on this machine", "model")

    monkeypatch.setattr(Client, "add_model", refuse)
    code, _, err = unfuse("models", "add", "/nowhere/flux", "--server", "http://127.0.0.1:1")
    said = "/nowhere/flux cannot be added: model 'flux': there is no such folder or file on this machine"
    assert (code, err.splitlines()[-1]) == (2, f"unfuse: {said}")


def test_option_before_models_subcommand_is_not_ignored(unfuse: Run) -> None:
    code, out, err = unfuse("models", "--server", "http://127.0.0.1:1", "rm", "flux")
    assert (code, out) == (2, "") and "--server has no effect before the verb: write unfuse models rm --server" in err
    assert unfuse("models", "--quiet", "rm", "flux", "--server", "http://127.0.0.1:1")[0] == 3


def test_every_models_subcommand_has_an_example(unfuse: Run) -> None:
    for verb in ("add", "rm"):
        assert f"Example: unfuse models {verb} " in " ".join(unfuse("models", verb, "--help")[1].split())
    assert {"add", "ls", "rm"} <= {*unfuse("models", "--help")[1].split()}


def test_model_state_shows_progress_or_failure_reason() -> None:
    assert state_of({"state": "loading", "reason": None, "progress": LOADING}) == "loading 1.0 MiB of 3.0 MiB"
    starting = {"phase": "starting", "done": 0, "total": 0}
    assert state_of({"state": "loading", "reason": None, "progress": starting}) == "starting"
    assert state_of({"state": "failed", "reason": "no room", "progress": None}) == "failed: no room"
    assert waits_for({"state": "loading", "progress": LOADING}) == "loading 1.0 MiB of 3.0 MiB"
    waits = waits_for({"state": "loading", "reason": None, "progress": None})
    assert waits == "loading: its workers have not registered yet", "as at a server that starts none"
