"""What narrowing an edge to 16 or 4 bits saves, and what it does to pictures of the built-in model.

Workers on three nodes of this machine, so that every output is pulled. The same captions and seeds each time; errors
are of pixels, in steps of 0 to 255, against no encoding. `python -m bench.encode [PICTURES]`
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from bench.report import show, table
from bench.servers import TOLD_S, pulled
from tools.server import Server, serving
from unfuse.wire.keys import create_keys

KINDS = ("text_encode", "denoise")
ENCODINGS = ("none", *(f"{kind}={encoding}" for kind in KINDS for encoding in ("bf16", "fp16", "int4")))
CAPTIONS = ("a red circle on white", "a blue star on black", "an orange ring on gray", "a green cross on white")
ROLES = ("encoder", "denoiser", "decoder")


def pictures(encoding: str, count: int) -> tuple[np.ndarray, float]:
    """Pictures as (count, height, width, 3), and the bytes that were pulled for each."""
    chosen = () if encoding == "none" else ("--encode", encoding)
    with tempfile.TemporaryDirectory() as folder:
        create_keys(Path(folder, "keys"))
        keys = ("--keys", f"{folder}/keys")
        with serving(Path(folder), "--workers", "none", *keys, *chosen) as server:
            for role in ROLES:
                server.worker(role, *keys, UNFUSE_RUN_DIR=f"{folder}/{role}")
            return made_by(server, count)


def made_by(server: Server, count: int) -> tuple[np.ndarray, float]:
    """The same, by a server whose workers are on their way."""
    server.ready()
    ids = [server.submit(CAPTIONS[seed % len(CAPTIONS)], seed=seed, cache=False) for seed in range(count)]
    assert {server.finished(id)["status"] for id in ids} == {"completed"}
    decoded = [np.asarray(Image.open(io.BytesIO(server.result(id))).convert("RGB"), int) for id in ids]
    time.sleep(TOLD_S)
    return np.stack(decoded), pulled(server) / count


def main(count: int) -> None:
    rows: dict[str, dict[str, object]] = {}
    plain = np.zeros(0)
    for encoding in ENCODINGS:
        made, nbytes = pictures(encoding, count)
        plain = made if encoding == "none" else plain
        error = np.abs(made - plain)
        rows[encoding] = {
            "KiB pulled a picture": round(nbytes / 1024, 1),
            "mean error": round(float(error.mean()), 4),
            "largest error": int(error.max()),
            "equal pixels": f"{(error == 0).mean():.1%}",
        }
    show("encode", pictures=count, encodings=rows)
    table("encoding", rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
