"""What the undivided pipeline makes, and what a server has to make of the same."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from tests.forking import isolated
from tools.server import Server

SHAPES = Path(__file__).parents[2] / "unfuse" / "models" / "shapes"
JUDGE = Path(__file__).with_name("reference.py")

PAIR: list[dict[str, Any]] = [
    {"prompt": "a red circle on white", "seed": 1},
    {"prompt": "a blue star on black", "seed": 2},
]

CAPTIONS = ["a red circle on white", "a blue star on black", "an orange ring on gray", "a green cross on white"]
CASES: list[dict[str, Any]] = [
    *({"prompt": caption, "seed": 11 + number} for number, caption in enumerate(CAPTIONS)),
    {"prompt": "a red circle on white", "seed": 12},
    {"prompt": "a red circle on white", "seed": 13},
    {"prompt": "a purple square on gray", "seed": 5, "num_inference_steps": 7, "guidance_scale": 1.0},
    {"prompt": "a yellow triangle on black", "seed": 6, "size": "96x64", "negative_prompt": "a ring on gray"},
    {"prompt": "a red circle on white", "seed": 99, "num_inference_steps": 100},
]
VIDEO: dict[str, Any] = {"prompt": CAPTIONS[0], "seed": 7, "num_frames": 9, "num_inference_steps": 5}
REFERENCES = {"pair": PAIR, "cases": CASES, "video": [VIDEO]}
"""What several modules compare with: one process makes them all, since each spends seconds on imports."""


def digest(picture: bytes) -> str:
    """SHA-256 of an encoded picture's pixels."""
    return hashlib.sha256(Image.open(io.BytesIO(picture)).convert("RGB").tobytes()).hexdigest()


def undivided(model: Path, folder: Path, cases: list[dict[str, Any]]) -> list[list[str]]:
    """SHA-256 of every frame that the undivided pipeline makes in each case, in a process that knows nothing of us."""
    (folder / "cases.json").write_text(json.dumps(cases))
    isolated(JUDGE, str(model), "out.json", "cases.json", folder=folder)
    found: list[list[str]] = json.loads((folder / "out.json").read_text())
    return found


def defaults() -> dict[str, Any]:
    """What the built-in model's pipeline is called with for a picture where a request says nothing."""
    found: dict[str, Any] = json.loads((SHAPES / "serving.json").read_text())["defaults"]
    return {name: value for name, value in found.items() if name != "fps"} | {"num_frames": 1}


def called(case: dict[str, Any]) -> dict[str, Any]:
    """What the built-in model's pipeline is called with for a request."""
    standard = defaults()
    width, height = map(int, case.get("size", f"{standard['width']}x{standard['height']}").split("x"))
    given = {name: value for name, value in case.items() if name != "size"}
    return standard | given | {"width": width, "height": height}


def made_pair(server: Server) -> list[str]:
    """The pixels of PAIR, made by a server."""
    ids = [server.submit(**case) for case in PAIR]
    assert [server.finished(id)["status"] for id in ids] == ["completed"] * len(ids)
    return [digest(server.result(id)) for id in ids]
