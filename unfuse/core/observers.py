"""Who hears of something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, Generic, ParamSpec, TypeVar

from unfuse.core.supervisor import Supervisor

Observer = TypeVar("Observer")
Said = ParamSpec("Said")


class Observers(Generic[Observer]):
    """All who hear it, in the order in which they came. What fails in one costs nothing but itself."""

    def __init__(self, background: Supervisor) -> None:
        self._background = background
        self._all: list[Observer] = []

    def add(self, *observers: Observer) -> None:
        """Have these hear everything from now on."""
        self._all += observers

    def tell(self, of: Callable[Concatenate[Observer, Said], None], *said: Said.args, **more: Said.kwargs) -> None:
        """Call the method of that name in each: `observers.tell(Observer.ended, context)`."""
        for observer in self._all:
            try:
                getattr(observer, of.__name__)(*said, **more)
            except Exception as error:  # the others must hear it
                self._background.log(f"telling {type(observer).__name__} of {of.__name__}", error)
