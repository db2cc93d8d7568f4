"""What a compute process tells of its texts: all of them together, each stage's once, and only news."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from unfuse.core.text import TextLoad
from unfuse.worker.compute_messages import TextsHeld
from unfuse.worker.step_loop import TextMeter


class Texts:
    """Blocks that a test sets."""

    def __init__(self, free: int) -> None:
        self.used, self.free, self.retracted = 0, free, 0

    def load(self) -> TextLoad:
        return TextLoad(self.used, self.free - self.used, 0)


def stage(texts: Texts | None) -> Any:
    return SimpleNamespace(texts=texts)


def test_what_stages_share_is_told_once_and_several_models_are_summed() -> None:
    """Given both stages of one model, one of another, and one without texts, then blocks of both models are told."""
    one, other, told = Texts(10), Texts(5), list[TextsHeld]()
    meter = TextMeter([stage(one), stage(one), stage(other), stage(None)], told.append)
    meter.tell(busy=False)
    one.used, other.used, one.retracted = 4, 1, 3
    meter.tell(busy=False)
    other.retracted = 1
    meter.tell(busy=False)
    assert told == [
        TextsHeld(TextLoad(0, 15), 0),
        TextsHeld(TextLoad(5, 10), 3),
        TextsHeld(TextLoad(5, 10), 1),
    ]


def test_who_works_tells_now_and_then_and_what_is_left_before_it_waits() -> None:
    texts, told = Texts(10), list[TextsHeld]()
    meter = TextMeter([stage(texts)], told.append)
    for texts.used in range(1, 4):
        meter.tell(busy=True)
    assert [one.load.used for one in told] == [1]
    meter.tell(busy=False)
    meter.tell(busy=False)
    assert [one.load.used for one in told] == [1, 3]


def test_a_process_without_texts_tells_nothing() -> None:
    told = list[TextsHeld]()
    TextMeter([stage(None)], told.append).tell(busy=False)
    assert not told
