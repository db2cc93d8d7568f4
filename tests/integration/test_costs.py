"""`serve --price`: what requests cost is on each, and adds up by tenant in the metrics."""

from __future__ import annotations

import json
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tools.server import Server, serving, until

KEYS = "ada key-ada\nbob key-bob\nroot key-root admin=yes\n"


def counted(server: Server, name: str, key: str) -> dict[str, float]:
    """A counter's sums by tenant, as this key sees them."""
    asked = urllib.request.Request(f"{server.url}/metrics", headers={"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        page = answer.read().decode()
    sums: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(page):
        for sample in (sample for sample in family.samples if sample.name == name):
            sums[sample.labels["tenant"]] += sample.value
    return dict(sums)


def shown(server: Server, key: str, request: str) -> dict[str, Any]:
    """A request as its tenant sees it."""
    asked = urllib.request.Request(f"{server.url}/v1/requests/{request}")
    asked.add_header("authorization", f"Bearer key-{key}")
    with urllib.request.urlopen(asked, timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def stopped(server: Server, key: str, status: str, **fields: Any) -> str:
    """The id of a request that ends amid its steps, once its worker has said what it used in all."""
    body = {"prompt": "a red star on white", "size": "256x256", "n": 8, "num_inference_steps": 100, **fields}
    authorization = f"Bearer key-{key}"
    id = server.post("/v1/images/generations", body, prefer="respond-async", authorization=authorization)["id"]

    def now() -> dict[str, Any]:
        return shown(server, key, id)

    until(lambda: "cpu" in now()["cost"]["device_s"], "a bill")
    before = now()["cost"]["device_s"]["cpu"]
    until(lambda: now()["cost"]["device_s"]["cpu"] > before or now()["status"] == "expired", "the bill to grow")
    if status == "cancelled":
        server.post(f"/v1/requests/{id}/cancel", {}, authorization=authorization)

    def settled() -> bool:
        request = now()
        stopped = [stage for stage in request["stages"] if stage["status"] == "cancelled" and stage["share_s"]]
        return request["status"] == status and bool(stopped) and all(stage["run_s"] > 0 for stage in stopped)

    until(settled, "the worker's last word")
    request = now()
    assert request["cost"]["device_s"]["cpu"] > before
    assert 0 < request["step"] <= request["steps"] == 100
    assert request["attempts"] == 1
    return str(id)


@pytest.mark.slow
def test_request_costs_add_up_by_tenant_in_metrics(tmp_path: Path) -> None:
    file = tmp_path / "api-keys"
    file.write_text(KEYS)
    with serving(tmp_path, "--arena", "64MiB", "--price", "cpu=3600/h", "--api-keys", str(file)) as server:
        server.ready()
        asked: list[tuple[str, str]] = []
        for key, prompts in (("ada", ("a red circle on white", "a blue star on gray")), ("bob", ("a green ring",))):
            for prompt in prompts:
                body = {"prompt": prompt, "response_format": "url"}
                made = server.post("/v1/images/generations", body, authorization=f"Bearer key-{key}")
                cost = shown(server, key, made["id"])["cost"]
                assert cost["device_s"].keys() == {"cpu"} and cost["device_s"]["cpu"] > 0
                assert cost["money"] == pytest.approx(cost["device_s"]["cpu"], abs=0.002)
                asked.append((key, made["id"]))
        asked.append(("bob", stopped(server, "bob", "cancelled")))
        asked.append(("bob", stopped(server, "bob", "expired", timeout=3)))

        def by_hand() -> dict[str, float]:
            sums: dict[str, float] = defaultdict(float)
            for key, id in asked:
                sums[key] += shown(server, key, id)["cost"]["money"]
            return sums

        for name in ("unfuse_money_total", "unfuse_device_seconds_total"):
            until(
                lambda name=name: counted(server, name, "key-root") == pytest.approx(by_hand(), abs=1e-4),
                f"{name} to agree",
            )
