"""Adapters that a machine lacks come from the scheduler's, are verified, and are kept by their content."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from unfuse.core.derived import Derived
from unfuse.core.errors import NotFound, PermanentError, TransientError, UnfuseError
from unfuse.core.messages import Borrow, Lent, Refused, Stranger
from unfuse.core.task import Claim, Lease
from unfuse.service.service import Lending
from unfuse.testing.queue_samples import task_of
from unfuse.weights.adapters import CHUNK, Loras
from unfuse.worker import loaded_models
from unfuse.worker.loaded_models import Borrowing
from unfuse.worker.worker import unfetched

DATA = os.urandom(2 * CHUNK + 7)
ID = xxhash.xxh3_128_hexdigest(DATA)
Change = Callable[[Lent], Any]


class Scheduler:
    """What a worker's link is to one whose folder is `folder`; `change` says what becomes of each answer."""

    def __init__(self, folder: Path, change: Change = lambda lent: lent) -> None:
        self.asked, self._change = list[Borrow](), change
        self._lending = Lending(None, str(folder))  # type: ignore[arg-type]

    async def call(self, message: Borrow) -> Any:
        self.asked.append(message)
        answer = await self._lending.answer(b"", message)
        return self._change(answer) if isinstance(answer, Lent) else answer


def lease(kind: str = "denoise", lora: str = "ink:0.5", ids: str = ID) -> Lease:
    params: dict[str, Any] = {"lora": lora} if lora else {}
    task = task_of("r", "denoise", 1, "p", kind, "m", params, derived=Derived(lora_id=ids if lora else ""))
    return Lease(task, "worker", b"token", 0.0)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """The scheduler's folder, the worker's own, and where it keeps what it borrows."""
    found = tmp_path / "there", tmp_path / "here", tmp_path / "data/loras"
    for folder in found[:2]:
        folder.mkdir()
    (found[0] / "ink.safetensors").write_bytes(DATA)
    return found


def bring(link: Scheduler, folders: tuple[Path, Path, Path], *leases: Lease) -> None:
    async def all_of_them() -> None:
        made = Borrowing(link, str(folders[1]), folders[2])  # type: ignore[arg-type]
        await asyncio.gather(*(made.bring(one) for one in leases or [lease()]))

    asyncio.run(all_of_them())


def kept(folders: tuple[Path, Path, Path]) -> list[str]:
    return sorted(file.name for file in folders[2].iterdir()) if folders[2].exists() else []


def test_it_comes_in_parts_once_and_is_found_by_its_content(folders: tuple[Path, Path, Path]) -> None:
    link = Scheduler(folders[0])
    bring(link, folders, lease(), lease())
    bring(link, folders, lease(lora="renamed"))
    assert [message.offset for message in link.asked] == [0, CHUNK, 2 * CHUNK]
    assert kept(folders) == [f"{ID}.safetensors"]
    assert Loras(str(folders[1]), str(folders[2])).file("ink", ID).read_bytes() == DATA


def test_nothing_is_asked_for_that_is_here_or_that_no_stage_uses(folders: tuple[Path, Path, Path]) -> None:
    link = Scheduler(folders[0])
    bring(link, folders, lease("text_encode"), lease(lora=""))
    asyncio.run(Borrowing(link, "", folders[2]).bring(lease()))  # type: ignore[arg-type]  # no adapters are served
    (folders[1] / "ink.safetensors").write_bytes(DATA)
    bring(link, folders)
    assert not link.asked and not kept(folders)


def test_another_file_of_that_name_here_is_not_taken_for_it(folders: tuple[Path, Path, Path]) -> None:
    (folders[1] / "ink.safetensors").write_bytes(b"other")
    bring(Scheduler(folders[0]), folders)
    assert Loras(str(folders[1]), str(folders[2])).file("ink", ID).read_bytes() == DATA


def test_what_was_kept_and_is_damaged_comes_again(folders: tuple[Path, Path, Path]) -> None:
    bring(Scheduler(folders[0]), folders)
    (folders[2] / f"{ID}.safetensors").write_bytes(DATA[:-1] + b"?")
    bring(again := Scheduler(folders[0]), folders)
    assert again.asked
    assert (folders[2] / f"{ID}.safetensors").read_bytes() == DATA


@pytest.mark.parametrize(("change", "error", "says"), [
    (lambda lent: Lent(lent.size, bytes(len(lent.data))), PermanentError, "what came has another content"),
    (lambda lent: Lent(lent.size - 1, lent.data), TransientError, "was changed while"),
    (lambda lent: Lent(lent.size, b""), TransientError, "was changed while"),
    (lambda lent: Lent(5 << 30, lent.data), PermanentError, "no more than"),
    (lambda _: Lent(0, b""), PermanentError, "no more than"),
    (lambda _: Refused("no lora 'ink' is there"), NotFound, "no lora 'ink' is there"),
    (lambda _: Stranger(), NotFound, "is not lent"),
])  # fmt: skip
def test_what_cannot_be_it_is_not_kept(
    change: Change, error: type[UnfuseError], says: str, folders: tuple[Path, Path, Path]
) -> None:
    with pytest.raises(error, match=says) as raised:
        bring(Scheduler(folders[0], change), folders)
    assert not kept(folders)
    failed = unfetched(Claim("r", "denoise", 1, b"t"), raised.value, True)
    assert failed.kind == ("transient" if error is TransientError else "permanent")


def test_an_id_is_no_path(folders: tuple[Path, Path, Path]) -> None:
    with pytest.raises(PermanentError, match="is no id of an adapter"):
        Loras(str(folders[0]), str(folders[2])).file("ink", "../../there/ink")


def test_a_name_is_no_path_and_the_lender_says_what_it_lacks(folders: tuple[Path, Path, Path]) -> None:
    async def ask(loras: str, name: str, id: str = ID) -> Any:
        return await Lending(None, loras).answer(b"", Borrow(name, id))  # type: ignore[arg-type]

    said = [asyncio.run(ask(str(folders[0]), name)) for name in ("../there/ink", "fog")]
    assert all(isinstance(answer, Refused) and "no lora" in answer.message for answer in said)
    assert "another content" in asyncio.run(ask(str(folders[0]), "ink", "0" * 32)).message
    assert "--loras FOLDER" in asyncio.run(ask("", "ink")).message


def test_room_is_looked_for_and_made(folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_models, "KEPT_BYTES", len(DATA) + 10)
    folders[2].mkdir(parents=True)
    for number, name in enumerate(("new", "old", ".left")):
        (folders[2] / name).write_bytes(bytes(8))
        os.utime(folders[2] / name, (1e9 - number, 1e9))
    bring(Scheduler(folders[0]), folders)
    assert kept(folders) == [f"{ID}.safetensors", "new"]
    monkeypatch.setattr(loaded_models.shutil, "disk_usage", lambda _: _Full)
    (folders[2] / f"{ID}.safetensors").unlink()
    with pytest.raises(TransientError, match="has room for 5"):
        bring(Scheduler(folders[0]), folders)


class _Full:
    free = 5
