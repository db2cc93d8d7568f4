"""Workers and pools: who serves, and how much waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_

import msgspec
from fastapi import APIRouter, Depends
from msgspec.structs import asdict

from unfuse.core.messages import Sharing
from unfuse.queues.base import Member
from unfuse.server.answers import POOL, WORKER, several
from unfuse.server.auth import admin_only
from unfuse.server.gateway import Served

router = APIRouter(tags=["workers"], dependencies=[Depends(admin_only)])


@router.get("/workers", responses=several(WORKER, paged=False))
async def workers(gateway: Served) -> dict[str, object]:
    """Registered workers; one that was silent for a lease time is not healthy until it is heard of again."""
    shown = gateway.names.shown
    now, healthy = await gateway.queue.now(), {member.info.id for member in await gateway.scheduler.registry.workers()}
    members = await gateway.queue.workers()
    return {"object": "list", "data": [_worker(member, member.info.id in healthy, now, shown) for member in members]}


def _worker(member: Member, healthy: bool, now: float, shown: Callable[[str], str]) -> dict[str, object]:
    """The answer's entry for one worker."""
    info, status = member.info, member.info.status
    return {
        "id": info.id,
        "object": "worker",
        "node": info.node,
        "role": info.role,
        "device": info.device,
        "pools": info.pools,
        "outcome": info.outcome,
        "slots": info.slots,
        "pid": info.pid,
        "room": info.room,
        "used": status.arena_used,
        "high_water": status.arena_high_water,
        "unwritten": status.waiting_for_results,
        "engines": info.engines,
        "holds": (shown(status.loaded) if status.loaded else None) if info.sets else "all",
        "leased": member.leased,
        "models": sorted(shown(card.name) for card in member.cards),
        "fragmentation": round(status.arena_fragmentation, 3),
        "ranks": [{key: round(seconds, 3) for key, seconds in asdict(rank).items()} for rank in status.ranks],
        "changed": {pool: str(file) for pool, file in info.changed.items()},
        "healthy": healthy,
        "seen_s": round(max(0.0, now - member.seen), 3),
    }


@router.get("/pools", responses=several(POOL, paged=False))
async def pools(gateway: Served) -> dict[str, object]:
    """Pools of the served models: the models that share each, its healthy workers, and the tasks that wait in it.

    `leased` counts all that its workers hold, of their other pools too; `oldest_s` is the longest wait of the first few
    in line. `shares` says how requests share forwards exactly: the largest batch that was found to change no byte of
    any, and for sizes that change some, the function that is to blame.
    """
    members = await gateway.scheduler.registry.workers()
    models = gateway.scheduler.registry.pools(await gateway.models())
    stats = await gateway.queue.stats(sorted(models))
    data = []
    for pool, names in models.items():
        inside = [member for member in members if pool in member.info.pools]
        data.append(
            {
                "id": pool,
                "object": "pool",
                "state": gateway.scheduler.registry.state(pool),
                "reason": str(gateway.scheduler.registry.changed_file(pool) or "") or None,
                "models": names,
                "workers": [member.info.id for member in inside],
                "slots": sum(member.info.slots for member in inside),
                "leased": sum(member.leased for member in inside),
                "waiting": stats.pools[pool].waiting,
                "oldest_s": round(stats.pools[pool].oldest_s, 3),
                "shares": msgspec.to_builtins(_shares(inside, pool), str_keys=True),
            }
        )
    return {"object": "list", "data": data}


def _shares(members: Sequence[Member], pool: str) -> Sharing:
    """What these workers found together."""
    return reduce(or_, (member.info.status.batch_invariance.get(pool, Sharing()) for member in members), Sharing())
