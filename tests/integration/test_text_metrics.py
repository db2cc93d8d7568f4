"""One server that makes pictures and texts, and its page of metrics."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.test_chat import ASKED, GREEDY
from tools.server import Server, serving, until
from tools.tiny_language import make_language_model
from unfuse.client import connect

KV_TOKENS = 320
"""Room for one text of the longest kind, and not for two."""
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
LONG = {**GREEDY, "max_tokens": 200, "logit_bias": {"2": -100, "0": -100}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = make_language_model(tmp_path_factory.mktemp("model") / "tiny", positions=300)
    models = str(folder), "unfuse/shapes", "--served-model-name", "tiny", "--served-model-name", "unfuse/shapes"
    room = "--kv", str(KV_TOKENS * TOKEN_BYTES)
    with serving(
        tmp_path_factory.mktemp("serve"),
        *models,
        "--workers",
        "all=1",
        "--threads",
        "1",
        "--batching",
        "batched",
        *room,
    ) as server:
        yield server.ready()


def scraped(server: Server) -> dict[tuple[str, ...], float]:
    """Every sample of the page, by its name and the values of its labels, in the order of their names."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (one.name, *(of.rpartition("/tiny")[1].strip("/") or of for _, of in sorted(one.labels.items()))): one.value
            for family in families
            for one in family.samples
        }


@pytest.mark.nightly
def test_metrics_page_has_image_and_text_metrics(server: Server) -> None:
    """Given a picture and three texts at one time, for which there is no room together, when all are made, then the
    page has the tokens of all texts, how long they took, and that one gave up its keys and values; and the picture."""
    with connect(server.url) as client, ThreadPoolExecutor(3) as several:
        client.generate("a red circle", model="unfuse/shapes", num_inference_steps=2)

        def ask(seed: int) -> int:
            body = {"model": "tiny", "messages": ASKED, **LONG, "seed": seed}
            return int(server.post("/v1/chat/completions", body)["usage"]["prompt_tokens"])

        prompts = [*several.map(ask, range(3))]
    until(lambda: scraped(server)["unfuse_retractions_total",], "a heartbeat to tell what texts gave up")
    until(lambda: not scraped(server)["unfuse_kv_blocks", "all", "used"], "what texts had to be free")
    page = scraped(server)
    assert page["unfuse_tokens_total", "prompt", "tiny"] == sum(prompts)
    assert page["unfuse_tokens_total", "cached", "tiny"] == 0
    assert page["unfuse_tokens_total", "completion", "tiny"] == 600
    assert page["unfuse_time_to_first_token_seconds_count", "tiny"] == 3
    assert page["unfuse_time_to_first_token_seconds_sum", "tiny"] > 0
    between, seconds = (page[f"unfuse_inter_token_seconds_{what}", "tiny"] for what in ("count", "sum"))
    assert 0 < between < 600, "those that are recorded with a text's first have nothing before them"
    assert 0 < seconds < page["unfuse_request_latency_seconds_sum", "tiny"]
    assert page["unfuse_kv_blocks", "all", "free"] == KV_TOKENS // 16
    assert page["unfuse_prefill_queue",] == 0
    assert page["unfuse_request_latency_seconds_count", "unfuse/shapes"] == 1
    assert page["unfuse_stage_latency_seconds_count", "unfuse/shapes", "denoise"] == 1
    assert page["unfuse_stage_latency_seconds_count", "tiny", "decode"] == 3
