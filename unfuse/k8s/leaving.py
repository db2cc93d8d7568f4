"""Who of a pool may go when there are to be fewer: nobody who has something to do, while one that stays has nothing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress

import httpx2

ASK_S, UNKNOWN_S = 5.0, 30
"""Seconds in which a gateway answers; and for how long none need say who is busy before that is not asked for."""

TASKS = re.compile(r'^unfuse_node_tasks\{node="(.+)-(\d+)"\} (?!0\.0$)', re.MULTILINE)


async def busy(pool: str, gateways: Iterable[str]) -> frozenset[int] | None:
    """The numbers of the workers that have tasks, as the first of these gateways says that answers; else None."""
    async with httpx2.AsyncClient(timeout=ASK_S) as client:
        for gateway in gateways:
            with suppress(httpx2.HTTPError):
                page = (await client.get(f"{gateway}/metrics")).raise_for_status().text
                return frozenset(int(number) for name, number in TASKS.findall(page) if name == pool)
    return None


def staying(wanted: int, there: int, has: Collection[int]) -> int:
    """How many of those that are `there` stay for now, with these that have tasks: a StatefulSet's last ones go."""
    late = [number for number in range(wanted, there) if number in has]
    idle = any(number not in has for number in range(wanted))
    return late[-1] + 1 if late and idle else wanted
