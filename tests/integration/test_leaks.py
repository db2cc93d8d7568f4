"""What a server says of a worker that holds memory for nobody."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

from tests.worker import outside
from tests.worker.outside.outside_store import FORGOTTEN
from tools.server import Server, serving, until

STORE = "--store", "outside_store:open_forgetful"


def leaked(server: Server, memory: str) -> float:
    """Bytes, as the page of metrics says."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as page:
        pattern = rf'^unfuse_leaked_bytes_total{{memory="{memory}",role="all"}} (\S+)$'
        return float(re.findall(pattern, page.read().decode(), re.MULTILINE)[0])


def test_leaked_arena_objects_are_logged_and_counted(tmp_path: Path) -> None:
    """Given a stage that is run by a store which forgets an object, when the request is over, then a line of the log
    names the object with its size, once, and its bytes are in a metric, which was 0 before."""
    model = str(outside.model(tmp_path / "outside"))
    with serving(tmp_path, model, *STORE, "--workers", "all=1", PYTHONPATH=str(outside.HERE)) as server:
        assert (leaked(server.ready(), "kv"), leaked(server, "arena")) == (0, 0)
        request = server.submit("hello")
        assert server.finished(request)["status"] == "completed"
        until(lambda: leaked(server, "arena"), "a heartbeat of an idle worker")
        assert leaked(server, "arena") % FORGOTTEN == 0
        count = round(leaked(server, "arena") / FORGOTTEN)
        (names,) = {tuple(re.findall(rf"an unfinished object \w+ of {request}", server.log()))}
        assert len(names) == len({*names}) == count
        assert leaked(server, "kv") == 0
