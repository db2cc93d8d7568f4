"""Tiny models of every family on a device against the CPU: how far results are apart, and whether they repeat.

python -m bench.gpu_families [--device cuda:0] GROUP
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bench.gpu_log import Facts
from bench.gpu_models import free_memory
from bench.gpu_pieces import GROUPS
from bench.model import Model
from tools import tiny
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.derived_facts import DerivedFacts
from unfuse.stages.base import StageInput

#: The stages' results of a request, by name: tensors and files.
Results = dict[str, Any]


def picture(seed: int) -> bytes:
    """Return a PNG file of random pixels."""
    file, pixels = io.BytesIO(), np.random.default_rng(seed).integers(0, 255, (80, 96, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def results(model: Model, uploads: Sequence[str]) -> Results:
    """Return what every stage computes of one request. Videos have one frame, so that no video encoder is needed."""
    params = model.params(1) | ({"num_frames": 1} if "num_frames" in model.card.defaults else {})
    derived = DerivedFacts(image_hashes={name: "0" * 64 for name in uploads})
    tensors: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for spec in model.card.pipeline.stages:
        if spec.name not in model.stages:
            continue
        stage = model.stages[spec.name]
        files_read = {name: picture(number) for number, name in enumerate(stage.uploads_of(derived))}
        inputs = {name: tensors[name] for name in spec.inputs if name in tensors}
        (output,) = stage.run([StageInput(params, inputs, files_read, derived=derived)])
        tensors |= {name: None if tensor is None else tensor.cpu() for name, tensor in output.tensors.items()}
        files |= {f"file {number}": media.data for number, media in enumerate(output.media)}
    return tensors | files


def distances(left: Results, right: Results) -> dict[str, float]:
    """Return the distance of tensors, relative to their norm, and of pictures in levels of 255."""
    found: dict[str, float] = {}
    for name, value in left.items():
        other = right[name]
        if isinstance(value, bytes):
            pixels, others = (np.asarray(Image.open(io.BytesIO(data)), np.int16) for data in (value, other))
            found[name] = int(abs(pixels - others).max())
        elif value is not None and value.is_floating_point():
            norm = value.float().norm().clamp(min=1e-9)
            found[name] = round(float((value.float() - other.float()).norm() / norm), 6)
    return found


def compare(folder: Path, kind: str, device: str) -> dict[str, Any]:
    """Compare a model on the device with the CPU in float32 and bfloat16, and with itself on the device."""
    uploads = (["image"] if kind in IMAGE_KINDS else []) + (["last_frame"] if kind.endswith("last") else [])
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        reference = results(Model(folder, ComputeOptions(device="cpu", dtype=dtype)), uploads)
        model = Model(folder, ComputeOptions(device=device, dtype=dtype), device)
        first, again = results(model, uploads), results(model, uploads)
        repeats = all(distance == 0 for distance in distances(first, again).values())
        found[dtype] = distances(reference, first) | {"repeats": repeats}
    return found


#: Kinds whose requests need a picture.
IMAGE_KINDS = {"kontext", *(kind for kind in tiny.KINDS if kind.startswith("wan") and "image" in kind)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_families", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("group", type=int, choices=range(len(GROUPS)))
    arguments = parser.parse_args()
    torch.set_num_threads(4)
    facts = Facts()
    with tempfile.TemporaryDirectory() as root:
        for kind in GROUPS[arguments.group]:
            folder = tiny.build(kind, Path(root, kind))
            facts.measure(kind, compare, folder, kind, arguments.device)
            free_memory()
    facts.end()


if __name__ == "__main__":
    main()
