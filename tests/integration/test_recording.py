"""What a client sees is as it was recorded, but for what renames.py says was renamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.comparing import UNORDERED, differences, packed, skipped, steady, unpacked
from tests.integration.recorded import BEFORE, circumstances
from tests.integration.recording import LAYOUTS, record, recorded_metrics, recorded_stream, surface, told_of
from tests.integration.renames import RENAMES

TABLE = RENAMES._replace(
    fields={"queued_s": "waited_s", "used": "held"},
    metrics={"unfuse_swaps_total": "unfuse_loads_total"},
    labels={"role": "kind"},
    settings={"UNFUSE_HOLD": "UNFUSE_MAX_LOADED_MODELS"},
    flags={"--hold": "--max-loaded-models"},
    values={"manned": "served"},
    removed={"fields": {"view.holds": "a flag says it"}, "flags": {"--no-workers": "--workers none"}},
    added={"fields": {"view.loaded": "what is in memory"}},
)
OLD: dict[str, Any] = {
    "circumstances": {"torch": "2"},
    "surface": {
        "flags": {"serve": {UNORDERED: ["--hold", "--no-workers"]}},
        "settings": {UNORDERED: ["UNFUSE_HOLD"]},
    },
    "sqlite": {
        "view": {
            "queued_s": "<number>",
            "steps": 30,
            "holds": "all",
            "results": [{"digest": {"sha256": "a"}}],
            "pieces": [[7, -1.5]],
        },
        "pools": {UNORDERED: [{"state": "manned", "slots": 2}, {"state": "asleep", "slots": 1}]},
        "metrics": {"unfuse_swaps_total": {"labels": {"role": {UNORDERED: ["all"]}}, "type": "counter"}},
    },
}
NEW: dict[str, Any] = {
    "circumstances": {"torch": "2"},
    "surface": {
        "flags": {"serve": {UNORDERED: ["--max-loaded-models"]}},
        "settings": {UNORDERED: ["UNFUSE_MAX_LOADED_MODELS"]},
    },
    "sqlite": {
        "view": {
            "waited_s": "<number>",
            "steps": 30,
            "loaded": 1,
            "results": [{"digest": {"sha256": "a"}}],
            "pieces": [[7, -1.5]],
        },
        "pools": {UNORDERED: [{"state": "asleep", "slots": 1}, {"state": "served", "slots": 2}]},
        "metrics": {"unfuse_loads_total": {"labels": {"kind": {UNORDERED: ["all"]}}, "type": "counter"}},
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """NEW with another value there; None takes it away."""
    found = unpacked(packed(NEW))
    *way, last = (int(one) if one.isdecimal() else one for one in path.split("/"))
    place: Any = found
    for one in way:
        place = place[one]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return found


def test_listed_renames_removals_and_additions_are_no_difference() -> None:
    assert differences(OLD, NEW, TABLE) == []
    assert len(differences(OLD, NEW, RENAMES)) > 8


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("sqlite/view/steps", 31, "sqlite.view.steps: 30, now 31"),
        ("sqlite/view/steps", 30.0, "sqlite.view.steps: 30, now 30.0"),
        ("sqlite/view/waited_s", None, 'sqlite.view.waited_s: is gone, was "<number>"'),
        ("sqlite/view/holds", "all", 'sqlite.view.holds: is new, "all"'),
        ("sqlite/view/results", [], "sqlite.view.results: 1 of them, now 0"),
        ("sqlite/view/results", [], 'sqlite.view.results: is gone, {"digest": {"sha256": "a"}}'),
        ("sqlite/view/results/0/loaded", 1, "sqlite.view.results[0].loaded: is new, 1"),
        ("sqlite/view/extra", 1, "sqlite.view.extra: is new, 1"),
        ("sqlite/view/results/0/digest/sha256", "b", 'sqlite.view.results[0].digest.sha256: "a", now "b"'),
        ("sqlite/view/pieces/0/1", -1.6, "sqlite.view.pieces[0][1]: -1.5, now -1.6"),
        (
            f"sqlite/pools/{UNORDERED}/0/slots",
            3,
            f'sqlite.pools.{UNORDERED}[{{"slots": 1, "state": "asleep"}}].slots: 1, now 3',
        ),
        (f"surface/flags/serve/{UNORDERED}", ["--hold"], f'surface.flags.serve.{UNORDERED}: is new, "--hold"'),
        (
            "sqlite/metrics/unfuse_loads_total/type",
            "gauge",
            'sqlite.metrics.unfuse_loads_total.type: "counter", now "g',
        ),
    ],
)
def test_unlisted_difference_is_reported_with_its_path(path: str, value: Any, told: str) -> None:
    found = differences(OLD, changed(path, value), TABLE)

    assert any(one.startswith(told) for one in found), found


def test_only_bytes_and_texts_are_skipped_with_other_library_versions() -> None:
    other = changed("sqlite/view/results/0/digest/sha256", "b") | {"circumstances": {"torch": "3"}}
    other["sqlite"]["view"]["pieces"][0][1] = -1.6  # a logprob

    assert differences(OLD, other, TABLE) == []
    assert skipped(OLD, other) == "bytes and texts are not compared: torch 2 then, 3 now"
    other["sqlite"]["view"]["steps"] = 31
    assert differences(OLD, other, TABLE) == ["sqlite.view.steps: 30, now 31"]


def test_missing_inter_token_label_of_a_model_is_no_difference() -> None:
    def recorded(*models: str) -> dict[str, Any]:
        names = "unfuse_inter_token_seconds", "unfuse_tokens_total"
        metrics = {name: {"labels": {"model": {UNORDERED: [*models]}}} for name in names}
        return {"circumstances": {}, "sqlite": {"gateways": [{"metrics": metrics}]}}

    told = differences(recorded("a", "b"), recorded("a"), RENAMES)
    assert told == [f'sqlite.gateways[0].metrics.unfuse_tokens_total.labels.model.{UNORDERED}: is gone, "b"']


def test_progress_of_few_steps_may_come_too_late_and_that_of_many_may_not() -> None:
    """A stage of three steps may end before its last step is reported."""

    def recorded(steps: int, *types: str) -> dict[str, Any]:
        return {"circumstances": {}, "hosts": {"events": [{"type": name, "steps": steps} for name in types]}}

    assert differences(recorded(3, "started", "progress"), recorded(3, "started"), RENAMES) == []
    assert len(differences(recorded(30, "started", "progress"), recorded(30, "started"), RENAMES)) == 2


def test_variable_values_are_replaced_by_placeholders_after_renames() -> None:
    view = {
        "id": "req_9c9fe2de43f524bb",
        "url": "http://127.0.0.1:30599/v1",
        "root": "/tmp/x/edit",
        "held": 7,
        "pid": 1,
        "waited_s": 0.5,
        "device_s": {"cpu": 1.5},
        "eta_s": None,
        "steps": 30,
        "digest": {"sha256": "9c9fe2de43f524bb"},
    }

    assert steady(view, TABLE.fields, "/tmp/x") == {
        "id": "req_<hex>",
        "url": "http://<address>/v1",
        "root": "<folder>/edit",
        "held": "<number>",
        "pid": "<number>",
        "waited_s": "<number>",
        "device_s": {"cpu": "<number>"},
        "eta_s": None,
        "steps": 30,
        "digest": {"sha256": "9c9fe2de43f524bb"},
    }


def test_recording_file_deduplicates_parts_and_round_trips() -> None:
    text = packed(NEW | {"redis": NEW["sqlite"]})

    assert unpacked(text) == NEW | {"redis": NEW["sqlite"]}
    assert text.count('"waited_s"') == 1


def event(kind: str, stage: str = "decode.0", step: int = 0) -> dict[str, Any]:
    return {"type": kind, "stage": stage, "step": step, "steps": 3}


def test_step_timing_and_token_chunking_are_no_difference() -> None:
    steps = [event("progress", step=step) for step in (1, 2, 3)]
    ends = [event("stage_completed"), event("completed", "")]
    one = [event("stage_started"), *steps, event("appended", step=3), *ends]
    other = [
        *[event("stage_started")] * 2,
        *steps[:2],
        event("appended", step=2),
        steps[2],
        event("appended", step=3),
        *ends,
    ]

    assert told_of(one, False) == told_of(other, False)
    assert told_of(one, False)["decode.0"][2]["step"] == "each from 1"
    assert told_of(one[:2] + one[3:], False)["decode.0"][2]["step"] == [1, 3], "one is missing"

    def lines(*texts: str) -> list[str]:
        chunks = [{"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]} for text in texts]
        return [*(f"data: {json.dumps(chunk)}" for chunk in chunks), "", "data: [DONE]"]

    assert recorded_stream(lines("a", "bc", "d")) == recorded_stream(lines("ab", "cd"))
    assert recorded_stream(lines("ab")) != recorded_stream(lines("abc"))


def test_metrics_are_recorded_with_labels_and_counter_totals() -> None:
    text = """# HELP unfuse_swaps_total Swaps
# TYPE unfuse_swaps_total counter
unfuse_swaps_total{pool="denoise:03a02c66a351"} 2.0
unfuse_swaps_total{pool="denoise:93555171e6a0"} 1.0
# HELP unfuse_swaps_created Swaps
# TYPE unfuse_swaps_created gauge
unfuse_swaps_created{pool="denoise:03a02c66a351"} 1.7e+09
# HELP unfuse_node_tasks Tasks
# TYPE unfuse_node_tasks gauge
unfuse_node_tasks 7.0
"""
    labels = {"pool": "denoise:<hex>"}

    assert recorded_metrics(text)["metrics"] == {
        "unfuse_node_tasks": {"type": "gauge", "help": "Tasks", "labels": {}},
        "unfuse_swaps_total": {
            "type": "counter",
            "help": "Swaps",
            "labels": {"pool": {UNORDERED: ["denoise:<hex>"]}},
            "totals": {UNORDERED: [{"labels": labels, "total": 3}]},
        },
    }


def compared(new: dict[str, Any]) -> None:
    old, new = unpacked(BEFORE.read_text()), {"circumstances": circumstances()} | new
    assert differences(old, new, RENAMES) == []
    if reason := skipped(old, new):
        pytest.skip(f"all else is as it was; {reason}")


@pytest.mark.nightly
def test_flags_and_settings_match_recording() -> None:
    compared({"surface": surface()})


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_responses_match_recording(layout: str, tmp_path: Path) -> None:
    compared(record(tmp_path, [layout]))
