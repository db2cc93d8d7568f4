"""The feature cache as clients see it: a number, where the server can do it."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from tests.server.served import PICTURES, serve
from unfuse.core.errors import ConfigError
from unfuse.service.options import default_params, serve_options
from unfuse.service.settings import load

IMAGES = "/v1/images/generations"


@pytest.mark.parametrize(
    ("asked", "expected"), [({}, 0.2), ({"feature_cache": 0}, 0.0), ({"feature_cache": "0.5"}, 0.5)]
)
def test_request_feature_cache_overrides_the_server_default(
    asked: dict[str, object], expected: float, tmp_path: Path
) -> None:
    with (
        serve(tmp_path, idle=False, standard={"feature_cache": 0.2}) as running,
        httpx2.Client(base_url=running.url, timeout=600, trust_env=False) as http,
    ):
        answer = http.post(IMAGES, json={"prompt": "a cat", **asked})
        assert answer.status_code == 200, answer.text
        params = running.run(running.queue.load(answer.json()["id"])).context.request.params
        (shown,) = http.get("/v1/models").json()["data"]
    assert params["feature_cache"] == expected
    assert shown["defaults"]["feature_cache"] == 0.2
    assert shown["id"] == PICTURES.name


@pytest.mark.parametrize(
    ("server", "asked", "says"),
    [
        (None, 0.2, "start the server with --batching batched"),
        ({"feature_cache": 0.0}, 1.5, "must be 0 to 1, not 1.5"),
        ({"feature_cache": 0.0}, "nan", "must be a number"),
    ],
)
def test_invalid_or_unsupported_feature_cache_returns_400(
    server: dict[str, float] | None, asked: object, says: str, tmp_path: Path
) -> None:
    with (
        serve(tmp_path, idle=False, standard=dict(server) if server else None) as running,
        httpx2.Client(base_url=running.url, timeout=600, trust_env=False) as http,
    ):
        answer = http.post(IMAGES, json={"prompt": "a cat", "feature_cache": asked})
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], says in answer.json()["error"]["message"]) == ("feature_cache", True)


def test_feature_cache_without_batched_mode_raises_config_error() -> None:
    flags = {"serve.feature_cache": 0.1}
    with pytest.raises(ConfigError, match="--feature-cache 0.1 .* add --batching batched"):
        serve_options(load(flags, None))
    assert default_params(load({**flags, "compute.batching": "batched"}, None).settings) == {"feature_cache": 0.1}
    assert default_params(load({}, None).settings) == {}
