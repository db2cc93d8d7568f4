"""The seconds of devices that a request has used: those on its bill, and those of attempts that were lost."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from unfuse.core.request import UNKNOWN_DEVICE, RequestContext, Running, Timings

DeviceSeconds = dict[str, float]
"""Seconds by the name of the device."""


def billed_seconds(context: RequestContext, running: Sequence[Running] = (), wall: float = math.inf) -> DeviceSeconds:
    """Return the seconds on a request's bill, those of its `running` attempts so far included.

    A running attempt counts for no longer than it has run at the Unix time `wall`.
    """
    ended = [state.timings for state in context.stages.values()]
    return _sums([*ended, *(believable(run.timings, wall - run.since) for run in running)])


def lost_seconds(context: RequestContext) -> DeviceSeconds:
    """Return the seconds that lost attempts at a request have used. They cost nothing."""
    found: DeviceSeconds = defaultdict(float)
    for state in context.stages.values():
        for device, seconds in state.lost_s.items():
            found[device] += seconds
    return dict(found)


def increase(before: Mapping[str, float], after: Mapping[str, float]) -> DeviceSeconds:
    """Return by how much the seconds of each device have grown."""
    return {name: more for name, seconds in after.items() if (more := seconds - before.get(name, 0.0)) > 0}


def believable(timings: Timings, elapsed_s: float) -> Timings:
    """Limit a task's share of computing to the seconds that have passed.

    Negative seconds mean that the clock was set back. Then there is nothing to compare with.
    """
    if elapsed_s < 0 or timings.share_s <= elapsed_s:
        return timings
    return msgspec.structs.replace(timings, share_s=elapsed_s)


def newest(known: Timings, reported: Timings) -> Timings:
    """Return what was reported of an attempt last. The seconds that it has used only grow."""
    of = reported if reported.device else known
    share_s = max(known.share_s, reported.share_s)
    return msgspec.structs.replace(reported, share_s=share_s, device=of.device, devices=of.devices)


def _sums(attempts: Iterable[Timings]) -> DeviceSeconds:
    found: DeviceSeconds = defaultdict(float)
    for timings in attempts:
        if timings.device_s:
            found[timings.device or UNKNOWN_DEVICE] += timings.device_s
    return dict(found)
