"""Drawings of the documentation, drawn from the code: `python -m tools.drawings` writes them into docs/images."""

from __future__ import annotations

from collections.abc import Callable

from tools.drawings.canvas import Drawing
from tools.drawings.layers import layers
from tools.drawings.machine import machine
from tools.drawings.pools import flow
from tools.drawings.request import life
from tools.drawings.states import lease_states, request_states, task_states, transfer_states
from tools.house import ROOT

FOLDER = ROOT / "docs" / "images"

DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "request": life,
    "machine": machine,
    "pools": flow,
    "layers": layers,
    "states-request": request_states,
    "states-task": task_states,
    "states-lease": lease_states,
    "states-transfer": transfer_states,
}
"""By the name of its file, what draws it."""
