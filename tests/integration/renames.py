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

RENAMES = Renames(
    fields={},
    metrics={},
    labels={},
    settings={},
    flags={},
    values={},
    removed={
        "fields": {"guidance-halves": HALVES},
        "metrics": {},
        "labels": {},
        "settings": {"UNFUSE_COMPUTE__GUIDANCE_HALVES": HALVES},
        "flags": {"--guidance-halves": HALVES, "--layouts": MEASURED},
    },
    added={"fields": {}, "metrics": {}, "labels": {}, "settings": {}, "flags": {}},
)
