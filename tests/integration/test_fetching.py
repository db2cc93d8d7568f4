"""`unfuse serve` with a hub name: what it lacks is brought amid cut connections, told of, and is enough to serve."""

from __future__ import annotations

from pathlib import Path

from tests.models.hub import serve
from tools.server import serving
from tools.tiny_whole import build

WHOLE = 1 << 30


def test_a_pipeline_comes_from_a_hub_that_breaks_off_and_is_served(tmp_path: Path) -> None:
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
            assert "whole fetches" in server.log()
            assert {worker["role"] for worker in server.get("/v1/workers")["data"]} == {"whole"}
        begun = [asked.file for asked in hub.asked if asked.storage and not asked.ranged]
        assert not hub.cuts and sorted(begun) == sorted(name for name in files if name.endswith(".safetensors"))
