"""What gateways say of a pool's workers: their ranks, and who is busy and does not go while one that stays is idle."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress

import httpx2

ASK_S, UNKNOWN_S = 5.0, 30
"""Seconds in which a gateway answers; and for how long none need say who is busy before that is not asked for."""

TASKS = re.compile(r'^unfuse_node_tasks\{node="(.+)-(\d+)"\} (?!0\.0$)', re.MULTILINE)
RANKS = re.compile(r'^unfuse_node_ranks\{node="(.+)-\d+"\} (\d+)\.0$', re.MULTILINE)


async def busy(pool: str, gateways: Iterable[str]) -> frozenset[int] | None:
    """The numbers of the workers that have tasks, as the first of these gateways says that answers; else None."""
    if (page := await _metrics(gateways)) is None:
        return None
    return frozenset(int(number) for name, number in TASKS.findall(page) if name == pool)


async def fewest_ranks(pool: str, gateways: Iterable[str]) -> int | None:
    """The ranks of the pool's worker that has fewest; None where no gateway answers, or knows one."""
    found = RANKS.findall(await _metrics(gateways) or "")
    return min((int(count) for name, count in found if name == pool), default=None)


async def _metrics(gateways: Iterable[str]) -> str | None:
    """What the first of these gateways says that answers; else None."""
    async with httpx2.AsyncClient(timeout=ASK_S) as client:
        for gateway in gateways:
            with suppress(httpx2.HTTPError):
                return (await client.get(f"{gateway}/metrics")).raise_for_status().text
    return None


def staying(wanted: int, there: int, has: Collection[int]) -> int:
    """How many of those that are `there` stay for now, with these that have tasks: a StatefulSet's last ones go."""
    late = [number for number in range(wanted, there) if number in has]
    idle = any(number not in has for number in range(wanted))
    return late[-1] + 1 if late and idle else wanted
