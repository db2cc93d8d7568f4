"""`unfuse serve` with a hub name: what it lacks is brought amid cut connections, told of, and is enough to serve.

And a model that is added by a hub name while the server runs, of a hub that vanishes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_models_come_and_go import add, asked_of, model, refused
from tests.models.hub import serve
from tools.server import serving, until
from tools.tiny_whole import build

WHOLE = 1 << 30


@pytest.mark.nightly
def test_hub_download_resumes_after_cut_connections_and_is_served(tmp_path: Path) -> None:
    """Given a class without a family, and two workers that want the same files at one time."""
    local = build("sd", tmp_path / "sd")
    files = {str(file.relative_to(local)): file.read_bytes() for file in local.rglob("*") if file.is_file()}
    with serve() as hub:
        hub.push("owner/sd", {**files, "pipeline.py": b"raise SystemExit"})
        hub.cuts, hub.pace_s = [1000, 2000, 1, WHOLE, WHOLE, WHOLE, 150_000, 100_000], 0.5  # headers come first
        home = {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        direct = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
        asked = ("owner/sd", "--workers", "whole=2", "--arena", "64MiB")
        with serving(tmp_path, *asked, **home, **direct) as server:
            server.ready()
            request = server.submit("a red circle", seed=3)
            assert server.finished(request)["status"] == "completed"
            assert "owner/sd is not split" in server.log()
            assert "whole downloading" in server.log()
            assert {worker["role"] for worker in server.get("/v1/workers")["data"]} == {"whole"}
        begun = [asked.file for asked in hub.asked if asked.storage and not asked.ranged]
        assert not hub.cuts and sorted(begun) == sorted(name for name in files if name.endswith(".safetensors"))


@pytest.mark.nightly
def test_model_with_an_unreachable_hub_fails_and_can_be_added_again(tmp_path: Path) -> None:
    """Given a model that is added by a hub name, when the hub is slow, and gone in the middle of the weights, then what
    was asked of it fails, the model is listed as failed, the server goes on, and once the hub is back the model can be
    added: what had come stays."""
    local = build("sd", tmp_path / "sd")
    files = {str(file.relative_to(local)): file.read_bytes() for file in local.rglob("*") if file.is_file()}
    weights = sum(len(content) for path, content in files.items() if path.endswith(".safetensors"))
    with serve() as hub:
        hub.push("owner/sd", files)
        hub.pace_s = 1.0
        home = {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        direct = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost", "HF_HUB_DOWNLOAD_TIMEOUT": "5"}
        with serving(tmp_path, "unfuse/shapes", "--workers", "all=1", "--arena", "64MiB", **home, **direct) as server:
            server.ready()
            assert add(server, "owner/sd")["state"] == "loading"
            request = asked_of(server, model="owner/sd")
            until(lambda: hub.sent > weights // 4, "some of the weights", server.process)
            hub.gone = True
            over = server.finished(request)
            assert (over["status"], over["error"]["code"]) == ("failed", "model_failed")
            assert model(server, "owner/sd")["state"] == "failed"
            assert "cannot be downloaded" in server.log() and "Traceback" not in server.log()
            assert server.finished(asked_of(server, model="unfuse/shapes"))["status"] == "completed"

            assert "owner/sd" in refused(400, add, server, "owner/sd"), "nobody can look into it"
            hub.gone, hub.pace_s = False, 0.0
            add(server, "owner/sd")
            assert server.finished(asked_of(server, model="owner/sd"))["status"] == "completed"
            went_on = [one for one in hub.asked if one.storage and one.ranged]
            assert went_on
