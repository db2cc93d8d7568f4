"""What `import unfuse` offers."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

import unfuse
from unfuse.client import Request, Result
from unfuse.core import errors
from unfuse.service.options import serve_options
from unfuse.service.service import listen
from unfuse.service.settings import load


def test_every_public_name_can_be_imported() -> None:
    for name in unfuse.__all__:
        assert getattr(unfuse, name) is not None


def test_dir_lists_exactly_the_public_names() -> None:
    assert dir(unfuse) == sorted(unfuse.__all__)


@pytest.mark.slow
def test_queues_and_stores_can_be_imported_without_torch() -> None:
    code = "import sys, unfuse; unfuse.queues.open('memory'); unfuse.TensorStore; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_client_objects_have_a_short_repr() -> None:
    client = unfuse.connect("http://127.0.0.1:9")
    view = {"id": "req_0", "status": "queued", "result": [{"content_type": "image/png"}]}
    assert repr(client) == "<Client of http://127.0.0.1:9>"
    assert repr(Request(client, view)) == "<Request req_0: queued>"
    assert repr(Result(view, [b"12345"])) == "<Result of req_0: 1 × image/png, 5 bytes>"


def test_public_errors_are_the_classes_that_are_raised() -> None:
    assert unfuse.Overloaded is errors.Overloaded
    assert unfuse.ObjectLost is errors.ObjectLost


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = unfuse.nothing  # type: ignore[attr-defined,unused-ignore]


def test_local_with_an_unknown_model_raises_config_error() -> None:
    with pytest.raises(errors.ConfigError, match="none/such/model"), unfuse.local("none/such/model"):
        pytest.fail("it started")


def test_listener_names_its_protocol_so_that_nagle_is_disabled(tmp_path: Path) -> None:
    """asyncio turns Nagle's algorithm off for sockets that name their protocol: 40 ms a reply, otherwise."""
    with listen(serve_options(load({"serve.port": 0}, None, {"UNFUSE_DATA_DIR": str(tmp_path)}))) as listener:
        assert listener.proto == socket.IPPROTO_TCP
