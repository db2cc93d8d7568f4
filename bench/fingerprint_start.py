"""What fingerprints of all bytes cost a start: `serve` of a model with one large file until the first picture is there.

`python -m bench.fingerprint_start --before CHECKOUT`. Three kinds of start take turns: the code in CHECKOUT, this code
with an empty data folder (every file is hashed), and this code with the data folder of an earlier start. The model is a
tiny FLUX whose text encoder has a tensor of `--gib` GiB, on the disk of `--folder`. Files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from safetensors.numpy import load_file, save_file

from bench.report import show, spread
from tools import tiny
from tools.server import serving
from unfuse.weights.fingerprints import Fingerprints

ROOT = Path(__file__).parents[1]
LARGE = "text_encoder_2/model.safetensors"


def build(folder: Path, gib: float) -> Path:
    """Save the model."""
    tiny.build("flux", folder)
    words = int(gib * (1 << 30)) // (4 * tiny.TEXT_DIM)
    config = folder / "text_encoder_2" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": words}))
    tensors = load_file(folder / LARGE)
    known = tensors["shared.weight"]
    tensors["shared.weight"] = np.zeros((words, tiny.TEXT_DIM), known.dtype)
    tensors["shared.weight"][: len(known)] = known
    save_file(tensors, folder / LARGE, {"format": "pt"})
    return folder


def start(data: Path, model: Path, code: Path) -> tuple[float, float]:
    """Return the seconds until `/ready` is 200, and until the first picture is there."""
    began = time.perf_counter()
    with serving(data, str(model), "--threads", "1", PYTHONPATH=str(code)) as server:
        server.ready()
        ready = time.perf_counter() - began
        server.post("/v1/images/generations", {"prompt": "cats", "seed": 5})
        return ready, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--starts", type=int, default=15)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    before = given.before.resolve()
    os.chdir(given.folder)  # Python would find the code of this folder first
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        model, kept, old = build(Path(place, "model"), given.gib), Path(place, "kept"), Path(place, "old")
        kept.mkdir()
        old.mkdir()
        began = time.perf_counter()
        Fingerprints().hash_file(model / LARGE)
        hashing_s = time.perf_counter() - began
        time.sleep(2)  # fingerprints of files that were written just now are not remembered
        start(kept, model, ROOT)
        times: dict[str, list[tuple[float, float]]] = {"before": [], "first": [], "later": []}
        for _ in range(given.starts):
            with tempfile.TemporaryDirectory(dir=given.folder) as fresh:
                times["before"].append(start(old, model, before))
                times["first"].append(start(Path(fresh), model, ROOT))
                times["later"].append(start(kept, model, ROOT))
    medians = {kind: [median(column) for column in zip(*rows, strict=True)] for kind, rows in times.items()}
    show(
        "fingerprint_start",
        gib=given.gib,
        hashing_s=round(hashing_s, 3),
        **{f"{kind}_picture_s": spread([row[1] for row in rows]) for kind, rows in times.items()},
        later_by_before=[round(a / b, 3) for a, b in zip(medians["later"], medians["before"], strict=True)],
        first_minus_before_s=[round(a - b, 3) for a, b in zip(medians["first"], medians["before"], strict=True)],
    )


if __name__ == "__main__":
    main()
