"""Dashboards and alerts ask for what a server really has on its /metrics, and an alert is fired and cured."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.comparing import kind_of
from tools.server import Server, serving, until

ROOT = Path(__file__).parents[2]
BOARD = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "unfuse.json").read_text())
(GROUP,) = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
ALERTS = {rule["alert"]: rule for rule in GROUP["rules"]}
ASKED = [(target["expr"], target["legendFormat"]) for panel in BOARD["panels"] for target in panel["targets"]]
ASKED += [(rule["expr"], re.sub(r"\$labels\.", "", rule["annotations"]["summary"])) for rule in ALERTS.values()]

TOKEN = re.compile(r'\s*(?:([a-z_]\w*)|(\d+(?:\.\d+)?)|("[^"]*")|(\[\d+[smhd]\])|([-+*/(){},=<>]=?))')
FUNCTIONS = {"rate", "increase", "histogram_quantile", "sum", "max", "min", "by", "and"}
OF_PROMETHEUS = {"up": {"job", "instance"}}
"""What Prometheus adds by itself."""
GROWS = ("_total", "_bucket", "_sum", "_count")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ("--workers", "none", "--price", "cpu=1/h", "--arena", "64MiB")
    with serving(tmp_path_factory.mktemp("dashboards"), *arguments) as server:
        until(lambda: server.get("/health"), "the server to answer", server.process)
        yield server


def scraped(server: Server) -> dict[str, Metric]:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as page:
        return {family.name: family for family in text_string_to_metric_families(page.read().decode())}


def held(server: Server) -> float:
    told = [scraped(server)[f"unfuse_device_{name}"].samples for name in ("busy_ratio", "memory_bytes")]
    return min(sum(sample.value for sample in samples) for samples in told)


def labels_of(families: dict[str, Metric]) -> dict[str, set[str]]:
    """The labels of every name that is on the page with a value; and of others that it has, none that are known."""
    found = {name: set[str]() for name in OF_PROMETHEUS}
    for family in families.values():
        names = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        found |= {family.name + end: set() for end in names}
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found | OF_PROMETHEUS


def tokens(expression: str) -> list[str]:
    """Those of a query. Fails for what is none."""
    found, at = [], 0
    while at < len(expression.rstrip()):
        match = TOKEN.match(expression, at)
        assert match, f"what is {expression[at:]!r} in {expression!r}?"
        found.append(match[0].strip())
        at = match.end()
    return found


def wrong_in(expression: str, legend: str, known: dict[str, set[str]]) -> str:
    """What is wrong with a query; "" if nothing is."""
    told = tokens(expression)
    if any(told.count(left) != told.count(right) for left, right in ("()", "{}")):
        return "brackets"
    grouped = {name.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for name in group.split(",")}
    matched = set(re.findall(r"(\w+)=\"", expression))
    words = {word for word in told if re.fullmatch(r"[a-z_]\w*", word)}
    names = words - FUNCTIONS - grouped - matched
    if unknown := names - known.keys():
        return f"no metric {unknown}"
    if ranged := [name for name in names if re.search(rf"{name}\[", expression) and not name.endswith(GROWS)]:
        return f"a rate of what does not grow: {ranged}"
    if bare := [name for name in names if name.endswith(GROWS) and not re.search(rf"{name}(\{{.*\}})?\[", expression)]:
        return f"a counter as it is: {bare}"
    has = set.union(*(known[name] for name in names))
    if unknown := (grouped | matched) - has:
        return f"no label {unknown}"
    shown = set(re.findall(r"{{ ?(\w+) ?}}", legend))
    left = grouped if grouped else has
    return f"the legend has {shown - left}" if shown - left else ""


def test_dashboard_and_alert_queries_match_exported_metrics(server: Server) -> None:
    """Given a picture that was made and one call of everything that counts by label, then every name and label of every
    query is on the page."""
    worker = server.worker("all")
    try:
        server.ready()
        assert server.finished(server.submit("a red circle on white"))["status"] == "completed"
        until(lambda: held(server), "a heartbeat to tell of what was computed, and of memory")
        known = labels_of(families := scraped(server))
    finally:
        worker.terminate()
        worker.wait(600)
    never = {
        "unfuse_lease_expired_total": {"pool", "numerics"},
        "unfuse_transfer_bytes_total": {"engine"},
        "unfuse_transfer_failures_total": {"engine"},
        "unfuse_webhooks_total": {"state"},
    }
    assert {name: known[name] for name in never} == dict.fromkeys(never, set()), "the page has these now"
    known |= never
    assert {(query, wrong) for query, legend in ASKED if (wrong := wrong_in(query, legend, known))} == set()
    (busy,) = families["unfuse_device_busy_ratio"].samples
    (memory,) = families["unfuse_device_memory_bytes"].samples
    assert busy.labels == memory.labels == {"device": "cpu"}
    assert 0 < busy.value <= 1 and memory.value > 64 << 20
    shares = [sample for sample in families["unfuse_worker_busy_ratio"].samples if sample.labels["numerics"]]
    assert len(shares) == 3 and all(sample.value == busy.value for sample in shares)


def test_dashboard_units_are_grafana_units() -> None:
    """It shows any other one as a word behind the number."""
    known = {"none", "short", "s", "bytes", "Bps", "percentunit"}
    assert {panel["fieldConfig"]["defaults"]["unit"] for panel in BOARD["panels"]} <= known


def test_query_check_detects_invalid_queries() -> None:
    known = {"a_total": {"pool"}, "b": {"role"}}
    assert wrong_in("sum by (pool) (rate(a_total[5m]))", "{{pool}}", known) == ""
    assert wrong_in("sum by (role) (rate(a_total[5m]))", "", known) == "no label {'role'}"
    assert wrong_in('b{role="x"} > 1', "{{ pool }}", known) == "the legend has {'pool'}"
    assert wrong_in("rate(b[5m])", "", known).startswith("a rate of what does not grow")
    assert wrong_in("a_total > 3", "", known).startswith("a counter as it is")
    assert wrong_in("c > 3", "", known) == "no metric {'c'}"
    assert wrong_in("(b > 3", "", known) == "brackets"


def test_every_alert_has_a_runbook_section_and_vice_versa() -> None:
    parts = re.findall(r"^## (\w+)$", (ROOT / "docs" / "operations" / "runbook.md").read_text(), re.MULTILINE)
    assert parts == [*ALERTS]
    assert [rule["annotations"]["runbook"] for rule in ALERTS.values()] == [
        f"docs/operations/runbook.md#{name.lower()}" for name in ALERTS
    ]


def without_worker(server: Server) -> set[str]:
    """The pools for which UnfusePoolWithoutWorker would be pending."""
    names = "unfuse_worker_idle", "unfuse_worker_active", "unfuse_pool_scaled_to_zero"
    assert ALERTS["UnfusePoolWithoutWorker"]["expr"] == f"sum by (pool) ({' + '.join(names)}) == 0"
    found: dict[str, float] = {}
    for name in names:
        for sample in scraped(server)[name].samples:
            found[sample.labels["pool"]] = found.get(sample.labels["pool"], 0.0) + sample.value
    return {kind_of(pool) for pool, count in found.items() if count == 0}


def test_pool_without_worker_alert_ends_when_a_worker_starts(server: Server) -> None:
    """Given a server without a denoiser, then the alert for its pool, and no other, is pending, `unfuse pools` shows
    that pool as the runbook says, and the worker that it says to start ends the alert."""
    until(lambda: len(without_worker(server)) == 3, "the workers of other tests to be gone")
    others = [server.worker(role) for role in ("encoder", "decoder")]
    until(lambda: without_worker(server) == {"denoise"}, "both pools to have workers")
    states = {kind_of(pool["id"]): pool["state"] for pool in server.get("/v1/pools")["data"]}
    assert states == {"text-encode": "live", "denoise": "unavailable", "vae-decode": "live"}
    cure = server.worker("denoiser")
    until(lambda: not without_worker(server), "the alert to end")
    for worker in (*others, cure):
        worker.terminate()
        worker.wait(600)
