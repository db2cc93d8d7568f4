"""The most waits of the host and kept bytes that a request may cost, by family and case, in `ceilings.json`.

    python -m tests.pretend.ceilings [--raise] [KIND ...]

Writes what is counted now. A count above its ceiling is an error, unless it is to be raised: a change that makes the
host wait more often needs a reason.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from tests.pretend.families import Family, cases, options_of
from tools import tiny

FILE = Path(__file__).with_name("ceilings.json")

Counts = dict[str, int]


def read() -> dict[str, Counts]:
    """The ceilings by "KIND CASE"; a count that is not there has the ceiling 0."""
    found: dict[str, Counts] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def exceeded(name: str, counts: Counts) -> dict[str, str]:
    """The counts that are above their ceilings."""
    ceilings = read().get(name, {})
    return {
        count: f"{number}, and at most {ceilings.get(count, 0)}"
        for count, number in counts.items()
        if number > ceilings.get(count, 0)
    }


def count(kind: str, folder: Path) -> dict[str, Counts]:
    """The counts of all cases of a family."""
    found = {}
    for case, params in cases(kind).items():
        found[f"{kind} {case}"] = Family(kind, folder / case, **options_of(case)).measure(params)[1]
    return found


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("kind", nargs="*")
    words.add_argument("--raise", dest="raises", action="store_true")
    asked = words.parse_args()
    torch.set_num_threads(1)
    known, ceilings = read(), read()
    for kind in asked.kind or tiny.KINDS:
        with tempfile.TemporaryDirectory() as folder:
            counted = count(kind, Path(folder))
        for name, counts in counted.items():
            above = exceeded(name, counts) if name in known else {}
            if above and not asked.raises:
                raise SystemExit(f"{name}: {above}. Use --raise if this is wanted.")
            print(name, counts, flush=True)
        ceilings |= counted
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(ceilings[name])}" for name in sorted(ceilings))
        FILE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
