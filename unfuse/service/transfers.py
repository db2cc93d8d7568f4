"""The transfer engines that the settings ask for: which a worker opens, and who can use each."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

import structlog

from unfuse.core.errors import ConfigError
from unfuse.core.registry import resolve
from unfuse.service.groups import Settings, Transfer
from unfuse.transfer import BACKENDS, open_engine
from unfuse.transfer.base import TransferEngine, TransferOptions

log = structlog.get_logger(__name__)


LIBRARIES = {"mooncake": "mooncake", "nixl": "nixl"}
"""The libraries of engines that are installed by an extra of the engine's name."""


def require_engines(names: Iterable[str]) -> None:
    """Raise ConfigError for an engine that is not known, or whose library is not installed. None is imported."""
    for name in names:
        if name not in BACKENDS and ":" not in name:
            resolve(BACKENDS, name, "transfer engine")
        if find_spec(LIBRARIES.get(name, __package__)) is None:
            raise ConfigError(f"the transfer engine {name} needs its library: pip install 'unfuse[{name}]'")


def engines(settings: Settings, options: TransferOptions) -> dict[str, TransferEngine]:
    """Open the engines that are set, none without keys to prove who peers are. Raises ConfigError if one cannot run."""
    if not options.authentic:
        log.debug("other machines cannot pull tensors from this worker: it has no --keys")
        return {}
    opened = {name: open_engine(name, options) for name in settings.transfer.engine}
    if open_to_all := [name for name, engine in opened.items() if not engine.enforces_refs]:
        log.warning(
            "whoever reaches this worker can read and overwrite its tensors; rdma is not verified", by=open_to_all
        )
    return opened


def transfers(wanted: Transfer) -> dict[str, str]:
    """For each transfer engine, whether it listens in the workers of this machine, and for whom."""
    states = {}
    for name in sorted({*BACKENDS, *wanted.engine}):
        try:
            engine: type[TransferEngine] = resolve(BACKENDS, name, "transfer engine")
        except ConfigError as error:
            states[name] = str(error)
            continue
        listens = "listens in every worker that has keys" if name in wanted.engine else "not used"
        whom = "to holders of the keys, and reads need the object's own"
        if not engine.enforces_refs:
            whom = (
                "whoever reaches it can read and overwrite all tensors: only with --trusted-network; rdma not verified"
            )
        states[name] = f"{listens}; {whom}"
    return states
