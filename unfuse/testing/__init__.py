"""Published conformance suites and fakes for tests: plain asserts, no test framework.

Each is imported on first use.
"""

from __future__ import annotations

from typing import Any

from unfuse.core.registry import resolve

_SUITES = {
    "ArenaOwner": "unfuse.testing.transfer_owner:ArenaOwner",
    "Faults": "unfuse.testing.transfer_faults:Faults",
    "FakeEngine": "unfuse.testing.fake_transfer:FakeEngine",
    "FaultyEngine": "unfuse.testing.transfer_faults:FaultyEngine",
    "ManualClock": "unfuse.testing.clock:ManualClock",
    "Pair": "unfuse.testing.transfer_suite:Pair",
    "VirtualClock": "unfuse.testing.virtual_time:VirtualClock",
    "VirtualTimeLoop": "unfuse.testing.virtual_time:VirtualTimeLoop",
    "check_launcher": "unfuse.testing.launcher_suite:check_launcher",
    "check_queue": "unfuse.testing.queue_suite:check_queue",
    "check_stage": "unfuse.testing.stage_suite:check_stage",
    "check_store": "unfuse.testing.store_suite:check_store",
    "check_transfer": "unfuse.testing.transfer_suite:check_transfer",
    "in_virtual_time": "unfuse.testing.virtual_time:in_virtual_time",
}


def __getattr__(name: str) -> Any:
    if name not in _SUITES:
        raise AttributeError(f"unfuse.testing has no {name}: it has {', '.join(_SUITES)}")
    return resolve(_SUITES, name, "suite")
