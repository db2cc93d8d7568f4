"""`serve --price`: what requests cost is on each, and adds up by tenant in the metrics."""

from __future__ import annotations

import json
import urllib.request
from collections import defaultdict
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tools.server import Server, serving

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


@pytest.mark.slow
def test_what_requests_cost_adds_up_by_tenant(tmp_path: Path) -> None:
    file = tmp_path / "api-keys"
    file.write_text(KEYS)
    with serving(tmp_path, "--arena", "64MiB", "--price", "cpu=3600/h", "--api-keys", str(file)) as server:
        server.ready()
        by_hand: dict[str, float] = defaultdict(float)
        for key, prompts in (("ada", ("a red circle on white", "a blue star on gray")), ("bob", ("a green ring",))):
            for prompt in prompts:
                body = {"prompt": prompt, "response_format": "url"}
                made = server.post("/v1/images/generations", body, authorization=f"Bearer key-{key}")
                asked = urllib.request.Request(f"{server.url}/v1/requests/{made['id']}")
                asked.add_header("authorization", f"Bearer key-{key}")
                with urllib.request.urlopen(asked, timeout=60) as answer:
                    cost = json.loads(answer.read())["cost"]
                assert cost["device_s"].keys() == {"cpu"} and cost["device_s"]["cpu"] > 0
                assert cost["money"] == pytest.approx(cost["device_s"]["cpu"], abs=0.002)
                by_hand[key] += cost["money"]
        assert counted(server, "unfuse_money_total", "key-root") == pytest.approx(by_hand, abs=1e-4)
        assert counted(server, "unfuse_device_seconds_total", "key-root") == pytest.approx(by_hand, abs=1e-4)
