"""Transfer engines: move bytes between nodes. `open_engine` opens one by its name."""

from __future__ import annotations

from collections.abc import Iterable

from unfuse.core.errors import ConfigError
from unfuse.core.registry import resolve
from unfuse.transfer.base import TransferEngine, TransferOptions

#: The engines of this package, as `module:attr` by name.
BACKENDS = {
    "gloo": "unfuse.transfer.pairs:GlooEngine",
    "mooncake": "unfuse.transfer.mooncake:MooncakeEngine",
    "nccl": "unfuse.transfer.pairs:NcclEngine",
    "nixl": "unfuse.transfer.nixl:NixlEngine",
    "tcp": "unfuse.transfer.tcp:TcpEngine",
    "zmq": "unfuse.transfer.zmq:ZmqEngine",
}

#: Engines, best first. The first four run only on request. Engines that are not listed come last.
PREFERENCE = ("nccl", "nixl", "mooncake", "gloo", "tcp", "zmq")


def open_engine(name: str, options: TransferOptions) -> TransferEngine:
    """Open the engine of that name, or `module:attr`.

    Raises ConfigError if the engine cannot run, or if it enforces no refs and the network is not trusted.
    """
    engine: type[TransferEngine] = resolve(BACKENDS, name, "transfer engine")
    if not engine.enforces_refs and not options.trusted_network:
        raise ConfigError(
            f"the transfer engine {name} lets any machine on the network read and overwrite all objects of this one: "
            "set --trusted-network if you trust all of these machines, or use tcp"
        )
    return engine(options)


def agree(ours: Iterable[str], theirs: Iterable[str]) -> list[str]:
    """Return the engines that both peers have, best first."""
    order = {name: place for place, name in enumerate(PREFERENCE)}
    return sorted(set(ours) & set(theirs), key=lambda name: (order.get(name, len(order)), name))
