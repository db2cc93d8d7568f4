"""What was renamed, removed or added since the recording in recorded_before.json: any other difference is a defect.

A name that a client sees and that changes has one line here. Old names are on the left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Names = Mapping[str, str]


class Renames(NamedTuple):
    """The new name by the old one, of each kind; what is gone or new by kind and name, with the reason."""

    fields: Names
    """Keys of JSON: of answers, events, requests, models, workers and pools."""
    metrics: Names
    """As /metrics has them, those of counters with `_total`."""
    labels: Names
    settings: Names
    """As variables: UNFUSE_SERVE__PORT."""
    flags: Names
    """With their hyphens: --port."""
    values: Names
    """Whole texts: of fields, of labels of metrics, what metrics say of themselves."""
    removed: Mapping[str, Names]
    added: Mapping[str, Names]


HALVES = "what was the default happens always"
MEASURED = "layouts and ranks are measured by bench/layouts.py and bench/degrees.py"
COUNTED = "one plan says how many workers there are of each role: --workers encoder=1,denoiser=2,decoder=1"
LOADED = "--max-loaded-models, of all verbs that start workers, is what --hold was"

RENAMES = Renames(
    fields={},
    metrics={},
    labels={},
    settings={"UNFUSE_WORKER__HOLD": "UNFUSE_WORKER__MAX_LOADED_MODELS"},
    flags={},
    values={
        "Tasks in a forward, as the mean of a stage's steps, in requests that succeeded": (
            "Requests in a forward: the mean over a stage's steps, observed when the request succeeds"
        ),
    },
    removed={
        "fields": {"guidance-halves": HALVES},
        "metrics": {},
        "labels": {},
        "settings": {
            "UNFUSE_COMPUTE__GUIDANCE_HALVES": HALVES,
            "UNFUSE_SERVE__ENCODERS": COUNTED,
            "UNFUSE_SERVE__DENOISERS": COUNTED,
            "UNFUSE_SERVE__DECODERS": COUNTED,
        },
        "flags": {
            "--guidance-halves": HALVES,
            "--layouts": MEASURED,
            "--no-workers": "it is --workers none",
            "--encoders": COUNTED,
            "--denoisers": COUNTED,
            "--decoders": COUNTED,
            "--hold": LOADED,
        },
    },
    added={"fields": {}, "metrics": {}, "labels": {}, "settings": {}, "flags": {"--max-loaded-models": LOADED}},
)
