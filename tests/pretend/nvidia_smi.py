"""Answers as `nvidia-smi` does for the GPUs of a pretended machine: `--query-gpu=...` and `-L`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def gpus(folder: Path) -> list[dict[str, str]]:
    """The fields of each GPU."""
    settings = json.loads((folder / "gpus.json").read_text())
    mebibytes = str(settings["capacity"] >> 20)
    return [
        {
            "index": str(index),
            "uuid": f"GPU-{index:08x}-0000-4000-8000-000000000000",
            "name": settings["name"],
            "memory.total": mebibytes,
            "memory.free": mebibytes,
            "memory.used": "0",
            "driver_version": "580.00",
            "compute_cap": settings["capability"],
        }
        for index in range(settings["count"])
    ]


def main() -> None:
    rows = gpus(Path(os.environ["PRETENDED_GPUS"]))
    query = next((word.partition("=")[2] for word in sys.argv if word.startswith("--query-gpu=")), "")
    for row in rows:
        if query:
            print(", ".join(row.get(field, "[N/A]") for field in query.split(",")))
        else:
            print(f"GPU {row['index']}: {row['name']} (UUID: {row['uuid']})")


if __name__ == "__main__":
    main()
