"""What layouts give on this machine, measured when somebody asks for it: `--workers auto` goes by it from then on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import structlog

from unfuse.core.card import ModelCard
from unfuse.core.compute import ComputeOptions
from unfuse.core.errors import ConfigError
from unfuse.launch.placement import Device

Rates = dict[str, Annotated[float, msgspec.Meta(gt=0)]]  # requests a second, by layout

log = structlog.get_logger(__name__)


def circumstances(cards: Iterable[ModelCard], compute: ComputeOptions, devices: Iterable[Device], cores: int) -> str:
    """What rates are of: weights and their dtypes, how is computed, devices and cores. Of others they say nothing."""
    pools = sorted({pool for card in cards for pool in card.pools().values()})
    return msgspec.json.encode((pools, cores, [device.name for device in devices], compute)).decode()


class Scaling:
    """Rates by circumstances, in a file. One that is not there, or cannot be read, has none; the latter is told of."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def of(self, circumstances: str) -> Rates:
        """What layouts gave under these circumstances."""
        return self._read().get(circumstances, {})

    def keep(self, circumstances: str, rates: Mapping[str, float]) -> None:
        """Remember rates, in the place of those of the same circumstances. Raises ConfigError if that cannot be."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._file.with_suffix(".new")
            fresh.write_bytes(msgspec.json.encode({**self._read(), circumstances: rates}))
            os.replace(fresh, self._file)
        except OSError as error:
            raise ConfigError(f"what layouts give cannot be kept in {self._file}: {error.strerror}") from error

    def _read(self) -> dict[str, Rates]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, Rates]) if self._file else {}
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("what layouts give cannot be read", file=str(self._file), reason=str(error))
            return {}
