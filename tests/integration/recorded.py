"""What servers answer, recorded, so that nobody changes it without knowing it.

    python -m tests.integration.recorded record FILE [sqlite|redis|hosts]...
    python -m tests.integration.recorded compare OLD NEW
    python -m tests.integration.recorded digests > tests/integration/recorded.json

The first writes what a dozen requests get, over SQLite, over Redis with two gateways, and on two hosts. The second
prints where two such files differ, but for what `renames.py` says was renamed; `recorded_before.json` is one to compare
with. The third writes the digests of ten more requests anew. Write either anew only when a change is wanted, and the
changelog says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.integration import recording
from tests.integration.comparing import both, differences, packed, skipped, unpacked
from tests.integration.renames import RENAMES
from tools.server import Server, serving
from tools.tiny import build

RECORDED = Path(__file__).with_suffix(".json")
BEFORE = Path(__file__).with_name("recorded_before.json")

IMAGES, VIDEOS = "/v1/images/generations", "/v1/videos"
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (IMAGES, {"prompt": "a red circle on white", "seed": 1}),
    (IMAGES, {"prompt": "an orange ring left of a blue star on gray", "seed": 7, "n": 2}),
    (IMAGES, {"prompt": "a purple square on gray", "seed": 5, "num_inference_steps": 7, "guidance_scale": 1.0}),
    (IMAGES, {"prompt": "a yellow triangle", "seed": 6, "size": "96x64", "negative_prompt": "a ring on gray"}),
    (IMAGES, {"prompt": "a green cross on black", "seed": 3, "output_format": "webp"}),
    (IMAGES, {"prompt": "a blue star on white", "seed": 4, "output_format": "jpeg", "output_compression": 80}),
    (VIDEOS, {"prompt": "a blue star moving left on black", "seed": 2}),
    (VIDEOS, {"prompt": "a red ring moving up on white", "seed": 8, "num_frames": 5, "output_format": "png"}),
    (IMAGES, {"prompt": "waves at dusk", "seed": 9, "model": "flux"}),
    (VIDEOS, {"prompt": "waves at dusk", "seed": 9, "model": "wan", "output_format": "png"}),
]


def circumstances() -> dict[str, str]:
    """What bytes depend on beside the code: the processor's maker and vector instructions, and the libraries."""
    import torch

    libraries = ("torch", "diffusers", "transformers", "numpy", "pillow", "av", "safetensors")
    cpu = Path("/proc/cpuinfo").read_text()
    vendor = next(line.partition(":")[2].strip() for line in cpu.splitlines() if line.startswith("vendor_id"))
    return {
        "machine": f"{platform.machine()} {vendor} {torch.backends.cpu.get_cpu_capability()}",
        "python": platform.python_version(),
        **{name: version(name) for name in libraries},
    }


@contextmanager
def server_of_all(folder: Path) -> Iterator[Server]:
    """A server of the built-in model and of two tiny ones of the real classes, as it starts by default."""
    models = [str(build(kind, folder / kind)) for kind in ("flux", "wan")]
    names = [f"--served-model-name={name}" for name in ("unfuse/shapes", "flux", "wan")]
    with serving(folder, "unfuse/shapes", *models, *names, "--threads", "1") as server:
        yield server.ready()


def answers(server: Server) -> list[list[str]]:
    """SHA-256 of every result of every request."""
    ids = [
        server.post(path, {"model": "unfuse/shapes"} | body, prefer="respond-async")["id"] for path, body in REQUESTS
    ]
    shown = [server.finished(id) for id in ids]
    return [
        [hashlib.sha256(server.result(id, index)).hexdigest() for index in range(len(request["result"]))]
        for id, request in zip(ids, shown, strict=True)
    ]


@contextmanager
def own_settings() -> Iterator[None]:
    """No UNFUSE_ variable of the caller reaches a server; processes meet in a folder of their own."""
    for name in [name for name in os.environ if name.startswith("UNFUSE_")]:
        del os.environ[name]
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="run-") as run:
        os.environ["UNFUSE_RUN_DIR"] = run
        yield


def write(file: Path, layouts: Sequence[str]) -> None:
    """Record those layouts, or all."""
    with tempfile.TemporaryDirectory() as place, own_settings():
        found = {"circumstances": circumstances(), "surface": recording.surface()}
        found |= recording.record(Path(place), [*layouts] or [*recording.LAYOUTS])
    file.write_text(packed(found))


def compare(old: Path, new: Path) -> int:
    """Print what differs beyond the renames; returns the exit code."""
    recordings = [unpacked(file.read_text()) for file in (old, new)]
    if reason := skipped(*recordings):
        print(reason)
    found = differences(*recordings, RENAMES)
    print("\n".join(found) or f"no difference: {', '.join(both(*recordings))}")
    return bool(found or not both(*recordings))


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["record", file, *layouts] if {*layouts} <= {*recording.LAYOUTS}:
            write(Path(file), layouts)
        case ["compare", old, new]:
            return compare(Path(old), Path(new))
        case ["digests"]:
            with tempfile.TemporaryDirectory() as place, server_of_all(Path(place)) as started:
                json.dump({"circumstances": circumstances(), "results": answers(started)}, sys.stdout, indent=1)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
