"""What a client without a key, with a wrong one, and with another tenant's key is told where keys are configured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.edge.test_keys import written
from tests.server.composed import call, composed
from tests.server.served import PICTURES, Served, serve
from unfuse.cli.main import run
from unfuse.client import connect
from unfuse.core.errors import ConfigError

KEYS = [
    "ada key-ada",
    "bob key-bob",
    "narrow key-narrow models=test/pictures",
    "root key-root admin=yes",
    "see key-see read=yes",
]
PROMPT = "a very secret circle"
NO_KEY = "send one by --api-key or UNFUSE_API_KEY"
WRONG_KEY = "the API key is not valid for this server"


def as_(served: Served, key: str = "") -> httpx2.Client:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx2.Client(base_url=served.url, headers=headers, trust_env=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway that has made a picture for each of two tenants."""
    with serve(tmp_path_factory.mktemp("strangers"), keys=KEYS) as running:
        for key in ("key-ada", "key-bob"):
            with as_(running, key) as http:
                asked = {"prompt": PROMPT, "model": PICTURES.name}
                assert http.post("/v1/images/generations", json=asked).status_code == 200
        yield running


def labels_on(page: str) -> dict[str, set[str]]:
    """The values of each label."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            for name, value in sample.labels.items():
                found.setdefault(name, set()).add(value)
    return found


def metrics(served: Served, key: str = "") -> str:
    with as_(served, key) as http:
        answer = http.get("/metrics")
    assert answer.status_code == 200, answer.text
    return answer.text


def test_metrics_without_a_key_omit_tenant_money_model_and_prompt(served: Served) -> None:
    page = metrics(served)
    assert not labels_on(page).keys() & {"tenant", "model", "loaded"}
    for word in ("ada", "bob", "money", "tenant", "test/", PROMPT, str(served.folder)):
        assert word not in page
    assert "unfuse_requests_completed_total 2.0" in page and "unfuse_queue_size{" in page


@pytest.mark.parametrize("key", ["key-root", "key-see"])
def test_admin_and_read_only_keys_get_all_metrics(served: Served, key: str) -> None:
    labels = labels_on(metrics(served, key))
    assert labels["tenant"] == {"ada", "bob"} and labels["model"] == {PICTURES.name}


def test_tenant_key_gets_metrics_of_no_other_tenant(served: Served) -> None:
    labels = labels_on(metrics(served, "key-ada"))
    assert labels["tenant"] == {"ada"} and labels["model"] == {PICTURES.name}
    assert not labels_on(metrics(served, "key-narrow")).keys() & {"tenant", "model"}


def test_metrics_with_a_wrong_key_return_401(served: Served) -> None:
    with as_(served, "key-wrong") as http:
        answer = http.get("/metrics")
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert [http.get(path).status_code for path in ("/health", "/ready", "/version")] == [200, 503, 200]


def test_open_metrics_are_complete_for_any_caller(tmp_path: Path) -> None:
    with serve(tmp_path, keys=KEYS, open_metrics=True) as open_to_all:
        with as_(open_to_all, "key-ada") as ada:
            ada.post("/v1/images/generations", json={"prompt": PROMPT, "model": PICTURES.name})
        for key in ("", "key-wrong", "key-bob"):
            assert labels_on(metrics(open_to_all, key))["tenant"] == {"ada"}


def test_ready_without_a_key_omits_model_names_and_reason(served: Served) -> None:
    """The model without a worker is named to whoever has a key."""
    with as_(served) as nobody, as_(served, "key-wrong") as wrong, as_(served, "key-ada") as ada:
        for http in (nobody, wrong):
            answer = http.get("/ready")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
            assert "retry-after" in answer.headers and "send an API key" in answer.text
            assert "test/" not in answer.text and answer.json().keys() == {"ready", "error"}
        assert "test/idle" in ada.get("/ready").text


def test_ready_without_a_key_returns_only_ready_true(tmp_path: Path) -> None:
    with serve(tmp_path, keys=KEYS, idle=False) as ready, as_(ready) as nobody, as_(ready, "key-ada") as ada:
        assert nobody.get("/ready").json() == {"ready": True}
        assert ada.get("/ready").json() == {"ready": True, "models": [PICTURES.name]}


def test_missing_and_wrong_api_key_have_different_messages(served: Served) -> None:
    with as_(served) as http:
        for headers in ({}, {"authorization": "Bearer"}, {"authorization": "Basic aa"}, {"authorization": "key-ada"}):
            error = http.get("/v1/models", headers=headers).json()["error"]
            assert NO_KEY in error["message"] and "Authorization: Bearer KEY" in error["message"]
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        for headers in ({"authorization": "Bearer key-eve"}, {"x-api-key": "key-eve"}):
            error = http.get("/v1/models", headers=headers).json()["error"]
            assert WRONG_KEY in error["message"] and NO_KEY not in error["message"]
            assert "key-eve" not in error["message"]


@pytest.mark.parametrize(("key", "said"), [("", NO_KEY), ("key-eve", WRONG_KEY)])
def test_client_and_cli_report_a_missing_or_wrong_api_key(
    served: Served, key: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UNFUSE_API_KEY", raising=False)
    with connect(served.url, key or None) as client, pytest.raises(ConfigError, match=said):
        client.get("/v1/models")
    verbs = [["models"], ["requests", "ls"], ["generate", "a circle", "-o", str(served.folder / "out.png")]]
    for verb in verbs:
        with pytest.raises(SystemExit) as ended:
            run([*verb, "--server", served.url, *(["--api-key", key] if key else [])])
        err = capsys.readouterr().err
        assert ended.value.code == 1 and said in err, verb


def test_foreign_host_header_gets_ready_without_model_names(tmp_path: Path) -> None:
    """A web page that has its own name lead here may reach the paths of probes, and learns nothing there."""
    with composed(tmp_path, models=["unfuse/shapes"]) as port:
        own, other = (call(port, "/ready", f"Host: {host}").body for host in ("localhost", "evil.example"))
        assert b"unfuse/shapes" in own and b"shapes" not in other
        assert json.loads(other)["error"]["code"] == "not_ready"
        assert call(port, "/metrics", "Host: evil.example").status == 200


def test_open_metrics_option_of_serve_exposes_all_metrics(tmp_path: Path) -> None:
    keys = [str(written(tmp_path, "ada k1"))]
    for number, is_open in enumerate((False, True)):
        with composed(tmp_path / str(number), api_keys=keys, open_metrics=is_open, price=["cpu=1/h"]) as port:
            assert (b"unfuse_money" in call(port, "/metrics").body) == is_open
