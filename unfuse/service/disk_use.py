"""What lies on this machine's disks for these settings, and what of it may go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unfuse.core.media import MEDIA
from unfuse.core.paths import expanded
from unfuse.service.groups import Settings
from unfuse.stores import COPIES

REQUESTS = tuple(medium.prefix for medium in MEDIA)  # prefixes of result folders

RESULTS_GO = "what is over goes after --retention, the oldest before that over --results-limit"


def disk_use(settings: Settings) -> list[dict[str, Any]]:
    """One row for each kind of thing: where, bytes (None: not on this machine), files, and what may go."""
    serve = settings.serve
    results, queue, durable, store = (
        url.replace("DATA_DIR", settings.data_dir) for url in (serve.results, serve.queue, serve.durable, serve.store)
    )
    spill = store.partition("+")[2] if store.startswith("spill:") else store if store.startswith("disk:") else ""
    rows = [_row("results", results, RESULTS_GO, REQUESTS)]
    rows += [_row("queue", queue, "nothing: requests that wait, and those that are kept")]
    if durable != "none":
        rows += [_row("copies of outputs", durable, "nothing: they go with their requests")]
    elif results.startswith("disk:"):
        saved = f"{results.partition('?')[0].rstrip('/')}/{COPIES}"
        rows += [_row("saved by the last stop", saved, "nothing: it goes with its requests")]
    if spill:
        rows += [_row("spilled tensors", spill, "nothing: they go with their requests; doctor --clean removes others")]
    own = Path(settings.data_dir)
    known = [Path(row["path"]) for row in rows if row["bytes"] is not None]
    rest = [path for path in _files(own) if not any(_within(path, place, own) for place in known)]
    what_else = "costs, verdicts and keys: only what can be measured or made again"
    rows += [{"what": "other data", "path": str(own), **_sums(rest), "may go": what_else}]
    return [*rows, _hub()]


def _row(what: str, url: str, may_go: str, prefixes: tuple[str, ...] = ()) -> dict[str, Any]:
    kind, _, place = url.partition(":")
    if kind not in ("disk", "sqlite") or not place:
        return {"what": what, "path": url.rpartition("@")[2], "bytes": None, "files": None, "may go": may_go}
    path = expanded(place.partition("?")[0])
    if kind == "sqlite":
        return {"what": what, "path": str(path), **_sums(path.parent.glob(f"{path.name}*")), "may go": may_go}
    found = (file for file in _files(path) if not prefixes or _top(file, path).startswith(prefixes))
    return {"what": what, "path": str(path), **_sums(found), "may go": may_go}


def _hub() -> dict[str, Any]:
    from huggingface_hub.constants import HF_HUB_CACHE

    may_go = "models that are not served: `hf cache delete`"
    return {"what": "models of the hub", "path": HF_HUB_CACHE, **_sums(_files(Path(HF_HUB_CACHE))), "may go": may_go}


def _within(file: Path, place: Path, own: Path) -> bool:
    """Whether a file of the data folder belongs to a place that has a row of its own."""
    if place == own:
        return _top(file, own).startswith(REQUESTS)
    return file.is_relative_to(place) or file.parent == place.parent and file.name.startswith(place.name)


def _top(file: Path, folder: Path) -> str:
    """The first part of a file's path below a folder that is followed by others."""
    parts = file.relative_to(folder).parts
    return parts[0] if len(parts) > 1 else ""


def _files(folder: Path) -> Iterator[Path]:
    for inside, _, names in os.walk(folder):
        yield from (Path(inside, name) for name in names)


def _sums(files: Iterator[Path] | list[Path]) -> dict[str, int]:
    """How many files, and their bytes; what several names have in common counts once."""
    seen: dict[tuple[int, int], int] = {}
    for file in files:
        try:
            stat = file.stat()
        except OSError:  # gone meanwhile, or a link to nothing
            continue
        seen[stat.st_dev, stat.st_ino] = stat.st_size
    return {"bytes": sum(seen.values()), "files": len(seen)}
