"""How every bench prints: the machine, the figures, one JSON object."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from statistics import median

NO_CACHE = ("--encoder-cache", "0")
"""For whoever compares with what encodes every time."""


def machine() -> dict[str, object]:
    model = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": model[0] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: list[float]) -> dict[str, float]:
    """Median, quartiles, extremes."""
    names = {"min": 0.0, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p99": 0.99}
    return {"n": len(values), **{name: round(quantile(values, share), 6) for name, share in names.items()}}


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Median of the pairwise ratios of interleaved measurements, with quartiles."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)]) | {
        "ratio_of_medians": round(median(ours) / median(theirs), 4)
    }


def show(name: str, **figures: object) -> None:
    print(json.dumps({"bench": name, "machine": machine(), **figures}, indent=1))


def table(title: str, rows: dict[str, dict[str, object]]) -> None:
    """Print rows as Markdown, columns in the order of the first that has them."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    print(f"\n| {title} |", *(f"{column} |" for column in columns))
    print("|---" * (len(columns) + 1) + "|")
    for name, row in rows.items():
        print(f"| {name} |", *(f"{row.get(column, '')} |" for column in columns))
