"""Adapters that this machine does not see: their files come from the scheduler's, and are kept by their content."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from pathlib import Path

import structlog
import xxhash

from unfuse.core.errors import NotFound, PermanentError, TransientError
from unfuse.core.messages import Borrow, Lent, Refused
from unfuse.core.parameters import scales
from unfuse.core.task import Lease
from unfuse.stages.specs import ADAPTED
from unfuse.weights.adapters import MAX_BYTES, Loras
from unfuse.worker.link import Link

KEPT_BYTES = 32 << 30  # how much a machine keeps; what was used longest ago goes first
LEFT_S = 3600.0  # after so long what nobody has written to is what a process left that was killed

log = structlog.get_logger(__name__)


class Borrowing:
    """Brings what the adapters' `folder` of this machine lacks into the folder `kept`.

    Nothing is brought if `folder` is empty: then the scheduler serves no adapters.
    """

    def __init__(self, link: Link, folder: str, kept: Path) -> None:
        self._link, self._loras, self._kept = link, Loras(folder, str(kept)), kept
        self._has_adapters = bool(folder)
        self._lock = asyncio.Lock()

    async def bring(self, lease: Lease) -> None:
        """Have the adapters of a task here, whose stage uses them. Raises what they cannot be had for."""
        task = lease.task
        if not task.derived.lora_id or task.planned.kind not in ADAPTED or not self._has_adapters:
            return
        for (name, _), id in zip(scales(str(task.params["lora"])), task.derived.lora_id.split(","), strict=True):
            async with self._lock:
                if not await asyncio.to_thread(self._loras.has, name, id):
                    await self._fetch(name, id)

    async def _fetch(self, name: str, id: str) -> None:
        place = self._loras.kept(id)
        part = place.with_name(f".{id}.{secrets.token_hex(4)}")
        digest, at, size, began = xxhash.xxh3_128(), 0, 1, time.monotonic()
        try:
            self._kept.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as stream:
                while at < size:
                    answer = await self._link.call(Borrow(name, id, at))
                    if not isinstance(answer, Lent):
                        raise NotFound(answer.message if isinstance(answer, Refused) else f"lora {name!r} is not lent")
                    size = size if at else self._room(name, answer.size)
                    if answer.size != size or not answer.data or at + len(answer.data) > size:
                        raise TransientError(f"lora {name!r} was changed while it was copied")
                    await asyncio.to_thread(stream.write, answer.data)
                    digest.update(answer.data)
                    at += len(answer.data)
            if digest.hexdigest() != id:
                raise PermanentError(f"lora {name!r} is not the one that was asked for: what came has another content")
            part.replace(place)
        except OSError as error:
            raise TransientError(f"lora {name!r} cannot be kept in {self._kept}: {error.strerror}") from error
        finally:
            part.unlink(missing_ok=True)
        log.info("an adapter came from the scheduler", lora=name, id=id, bytes=size, seconds=time.monotonic() - began)

    def _room(self, name: str, size: int) -> int:
        """The size of a file for which there is room now."""
        if not 0 < size <= MAX_BYTES:
            raise PermanentError(f"lora {name!r} has {size} bytes, and no more than {MAX_BYTES} are read")
        left, now = KEPT_BYTES - size, time.time()
        files = sorted(((file, file.stat()) for file in self._kept.iterdir()), key=lambda one: -one[1].st_atime)
        for file, stat in files:
            left -= stat.st_size
            if left < 0 or (file.name.startswith(".") and now - stat.st_mtime > LEFT_S):
                file.unlink(missing_ok=True)
        if (free := shutil.disk_usage(self._kept).free) < size:
            raise TransientError(f"lora {name!r} has {size} bytes, and {self._kept} has room for {free}")
        return size
