"""What requests cost: seconds of devices, and money by what an hour of each kind of device costs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from unfuse.core.errors import UsageError
from unfuse.core.registry import nearest
from unfuse.core.request import UNKNOWN_DEVICE

KINDS = ("cpu", "cuda", "xpu", "mps")
"""Kinds of devices that can have a price. A device of any other name is a GPU's, and of the kind cuda."""

_PRICE = re.compile(r"([a-z]+)=([0-9]{1,9}(?:\.[0-9]{1,9})?)/h")


class Prices:
    """Prices by kind of device, each `KIND=AMOUNT/h`, in whatever currency. Raises ConfigError."""

    def __init__(self, given: Sequence[str] = ()) -> None:
        self._by_kind: dict[str, float] = {}
        for entry in given:
            if not (found := _PRICE.fullmatch(entry)):
                raise UsageError(f"--price {entry}: write KIND=AMOUNT/h, like cuda=1.20/h")
            if found[1] not in KINDS:
                close = nearest(found[1], KINDS, 0.5)
                hint = f"did you mean {close}?" if close else f"there are {', '.join(KINDS)}"
                raise UsageError(f"--price {entry}: there are no devices of the kind {found[1]}; {hint}")
            self._by_kind[found[1]] = float(found[2])

    def unseen(self, devices: Sequence[str]) -> list[str]:
        """The kinds that have a price, and of which none of these devices is."""
        return sorted(self._by_kind.keys() - {device.partition(":")[0] for device in devices})

    def money(self, spent: Mapping[str, float]) -> float | None:
        """What so many seconds of each device cost; what has no price costs nothing. None if nothing has."""
        if not self._by_kind:
            return None
        return sum(self._by_kind.get(kind_of(device), 0.0) * seconds / 3600 for device, seconds in spent.items())


FREE = Prices()  # no prices


def kind_of(device: str) -> str:
    """The kind of a device by the name that its worker reports; one that reports none has no kind."""
    kind = device.partition(":")[0]
    return kind if kind in (*KINDS, UNKNOWN_DEVICE) else "cuda"
