"""Recordings without what differs from run to run, and where two of them differ."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from tests.integration.renames import Renames

NUMBER = "<number>"
VARYING = {"at", "created", "pid", "used", "high_water", "unwritten", "fragmentation", "money", "seq", "batch"}
"""Keys of numbers that no two runs share, beside those whose names end like a time."""

TIMES = re.compile(r"_(s|ms|at|seconds)$")
CIRCUMSTANTIAL = {"digest", "bytes", "numerics", "content", "logprobs", "pieces", "usage"}
"""Keys of what depends on the processor and the libraries beside the code."""

TIMED_PATHS = re.compile(r"\.metrics\.unfuse_inter_token_seconds\.labels\.model\.")
"""Paths of what depends on time: a model is there only if not all of its tokens were recorded at once."""

FEW_STEPS = 4
"""A stage with at most so many steps may end within the interval of reports. What its last report tells of is then told
only if it comes before its end."""

UNORDERED = "in any order"
"""The key of a list whose order says nothing."""

POOL = re.compile(
    r"(?<![\w-])((?:text|image|redraw|vision)-encode(?:-\d)?|denoise|vae-decode|prefill|decode|whole)"
    r"-[a-z0-9-]+-(bf16|f16|f32)-[0-9a-f]{8}(?![\w-])"
)
"""The name of a pool: its stage kind, its class and its dtype."""

TEXTS = (
    (POOL, r"\1-<class>-\2-<hex>"),
    (re.compile(r"\b(https?|tcp)://[0-9.]+:\d+"), r"\1://<address>"),
    (re.compile(r"\b\w{3}, \d\d \w{3} \d{4} [0-9:]{8} GMT\b"), "<time>"),
    (re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{8,}(?![0-9A-Za-z])"), "<hex>"),
)
SHOWN, SHORT = 300, 60
"""Characters of a value that differs, and of one that says which it is."""

SHARED = 60
PART = "part"
"""What parts of a recording's file have at least, in characters, that are written once; the key of where they are."""

KINDS = ("fields", "metrics", "labels", "settings", "flags")
LISTED = ("settings", "flags")
"""Kinds whose names are listed, not keys."""


def kind_of(pool: str) -> str:
    """The stage kind in a pool's name."""
    match = POOL.fullmatch(pool)
    assert match, f"{pool} is not the name of a pool"
    return match[1]


def varies(key: str, names: Mapping[str, str]) -> bool:
    """Whether the numbers at a key are no two runs' own, by its name or the one it had."""
    olds = (old for old, new in names.items() if new == key)
    return any(one in VARYING or bool(TIMES.search(one)) for one in (key, *olds))


def steady(found: Any, names: Mapping[str, str], folder: str = "", masked: bool = False) -> Any:
    """The same with placeholders for ids, addresses, folders, times and what memory is in use; digests stay."""
    if isinstance(found, dict):
        masked = masked and not any(isinstance(value, dict | list) for value in found.values())
        return {
            steady(key, names, folder): value
            if key == "digest"
            else steady(value, names, folder, masked or varies(key, names))
            for key, value in found.items()
        }
    if isinstance(found, list):
        return [steady(one, names, folder) for one in found]
    if isinstance(found, str):
        text = found.replace(folder, "<folder>") if folder else found
        for pattern, placeholder in TEXTS:
            text = pattern.sub(placeholder, text)
        return text
    return NUMBER if masked and found is not None and not isinstance(found, bool) else found


def packed(found: dict[str, Any]) -> str:
    """A recording as text, in which parts that occur several times are said once."""
    times = Counter(json.dumps(part) for part in _parts(found))
    shared = dict[str, int]()

    def pack(part: Any) -> Any:
        text = json.dumps(part)
        if isinstance(part, dict | list) and len(text) >= SHARED and times[text] > 1:
            if text not in shared:
                lines.append(_line(_inside(part, pack)))
                shared[text] = len(lines) - 1
            return {PART: shared[text]}
        return _inside(part, pack)

    lines = list[str]()
    rest = ",\n".join(f"{json.dumps(name)}:{_line(pack(part))}" for name, part in found.items())
    return f'{{"{PART}s":[\n{("," + chr(10)).join(lines)}\n],\n{rest}}}\n'


def unpacked(text: str) -> dict[str, Any]:
    """The recording that such a text is of."""
    found = json.loads(text)
    parts = found.pop(f"{PART}s")

    def unpack(part: Any) -> Any:
        if isinstance(part, dict) and [*part] == [PART]:
            return unpack(parts[part[PART]])
        return _inside(part, unpack)

    return dict(unpack(found))


def _inside(part: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(part, dict):
        return {key: change(value) for key, value in part.items()}
    return [change(one) for one in part] if isinstance(part, list) else part


def _parts(found: Any) -> Iterator[Any]:
    inside = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    for part in inside:
        if isinstance(part, dict | list):
            yield part
            yield from _parts(part)


def _line(part: Any) -> str:
    return json.dumps(part, ensure_ascii=False, separators=(",", ":"))


def differences(old: dict[str, Any], new: dict[str, Any], renames: Renames) -> list[str]:
    """What differs beyond the renames, each with its path, in what both have recorded."""
    same = old["circumstances"] == new["circumstances"]
    found = list[str]()
    for name in both(old, new):
        was, now = _expected(old[name], renames), _left(new[name], renames.added)
        found += _between(without_late_progress(was), without_late_progress(now), name, same)
    return [path for path in found if not TIMED_PATHS.search(path)]


def without_late_progress(found: Any) -> Any:
    """The same without the progress of stages of so few steps that it may come too late to be told."""
    if isinstance(found, list):
        return [without_late_progress(one) for one in found if not _may_be_late(one)]
    return {key: without_late_progress(value) for key, value in found.items()} if isinstance(found, dict) else found


def _may_be_late(event: Any) -> bool:
    return (
        isinstance(event, dict) and event.get("type") == "progress" and event.get("steps", FEW_STEPS + 1) <= FEW_STEPS
    )


def both(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The layouts that both have recorded, and `surface` if they have."""
    return [name for name in old if name in new and name != "circumstances"]


def skipped(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Why bytes and texts are not compared; empty if they are."""
    was, now = old["circumstances"], new["circumstances"]
    other = [name for name in sorted({*was, *now}) if was.get(name) != now.get(name)]
    told = "; ".join(f"{name} {was.get(name)} then, {now.get(name)} now" for name in other)
    return f"bytes and texts are not compared: {told}" * bool(other)


def _between(old: Any, new: Any, path: str, same: bool) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            at = f"{path}.{key}"
            if key not in new:
                yield f"{at}: is gone, was {_short(old[key])}"
            elif key not in old:
                yield f"{at}: is new, {_short(new[key])}"
            elif same or key not in CIRCUMSTANTIAL:
                between = _in_any_order if key == UNORDERED else _between
                yield from between(old[key], new[key], at, same)
    elif isinstance(old, list) and isinstance(new, list) and len(old) != len(new):
        yield f"{path}: {len(old)} of them, now {len(new)}"
        yield from _in_any_order(old, new, path, same)
    elif isinstance(old, list) and isinstance(new, list):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from _between(*pair, f"{path}[{number}]", same)
    elif old != new or type(old) is not type(new):
        yield f"{path}: {_short(old)}, now {_short(new)}"


def _in_any_order(old: list[Any], new: list[Any], path: str, same: bool) -> Iterator[str]:
    """Equal ones are taken from both; what is left is compared one by one, texts are said whole."""
    was, now = (Counter(json.dumps(one, sort_keys=True) for one in each) for each in (old, new))
    gone, came = (sorted(each.elements()) for each in (was - now, now - was))
    if len(gone) == len(came) and not any(isinstance(one, str) for one in old + new):
        for left, right in zip(gone, came, strict=True):
            yield from _between(json.loads(left), json.loads(right), f"{path}[{left[:SHORT]}]", same)
        return
    yield from (f"{path}: is gone, {one[:SHOWN]}" for one in gone)
    yield from (f"{path}: is new, {one[:SHOWN]}" for one in came)


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:SHOWN]


def _expected(found: Any, renames: Renames) -> Any:
    """An old recording in today's names, without what was removed."""
    return _renamed(_left(found, renames.removed), renames, "fields")


def _kind(key: str, kind: str) -> str:
    """What the keys below this one are names of."""
    return key if key in KINDS else kind


def _left(found: Any, gone: Mapping[str, Mapping[str, str]], kind: str = "fields", path: str = "") -> Any:
    """What is left without these names, of fields without those at these paths."""
    if isinstance(found, dict):
        places = {key: path if key == UNORDERED else f"{path}.{key}".removeprefix(".") for key in found}
        return {
            key: _left(value, gone, _kind(key, kind), places[key])
            for key, value in found.items()
            if not _is_listed(places[key] if kind == "fields" else key, gone.get(kind, {}))
        }
    if isinstance(found, list):
        return [
            _left(one, gone, kind, path)
            for one in found
            if not (isinstance(one, str) and kind in LISTED and one in gone.get(kind, {}))
        ]
    return found


def _is_listed(place: str, places: Mapping[str, str]) -> bool:
    """Whether a name, or the path of a field, is one of these; a `*` in them stands for any text."""
    return any(fnmatchcase(place, listed) for listed in places)


def _renamed(found: Any, renames: Renames, kind: str) -> Any:
    names: Mapping[str, str] = getattr(renames, kind)
    if isinstance(found, dict):
        return {names.get(key, key): _renamed(value, renames, _kind(key, kind)) for key, value in found.items()}
    if isinstance(found, list):
        return [_renamed(one, renames, kind) for one in found]
    if isinstance(found, str):
        return names.get(found, found) if kind in LISTED else renames.values.get(found, found)
    return found
