"""Those who hear of something."""

from __future__ import annotations

from structlog.testing import capture_logs

from unfuse.core.supervisor import Observers, Supervisor


class Hearing:
    """Remembers what it was told of."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def ended(self, what: str) -> None:
        self.heard.append(what)


class Failing(Hearing):
    """Cannot."""

    def ended(self, what: str) -> None:
        raise OSError(28, "No space left on device")


def test_what_fails_in_one_costs_the_others_nothing_and_is_told_once() -> None:
    """Given three observers of which the second fails, when they are told twice, then the others heard all of it."""
    first, last = Hearing(), Hearing()
    observers = Observers[Hearing](Supervisor())
    observers.add(first, Failing())
    observers.add(last)
    with capture_logs() as logs:
        for what in ("one", "two"):
            observers.tell(Hearing.ended, what)
    assert first.heard == last.heard == ["one", "two"]
    assert [line["doing"] for line in logs] == ["telling Failing of ended"]
