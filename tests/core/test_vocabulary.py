"""Hints on words that a model does not know."""

from __future__ import annotations

import pytest

from unfuse.core.card import MOST_CHARS, Vocabulary

FEW = Vocabulary(("a", "Red", "circle", "café"), "circles")


@pytest.mark.parametrize("prompt", ["a red circle", "A RED, circle!", "", "  \n", "red_circle", "a cafe\u0301"])
def test_a_prompt_of_known_words_gets_no_hint(prompt: str) -> None:
    assert FEW.hint("me/shapes", prompt) == ""


def test_a_hint_names_each_unknown_word_once_and_what_the_model_makes() -> None:
    said = FEW.hint("me/shapes", "a spaceship over a red city, a Spaceship")
    assert said == "me/shapes does not know spaceship, over, city: it makes circles"


def test_a_hint_is_short_and_has_nothing_that_moves_a_terminal() -> None:
    long = "\x1b[2J " + "x" * 1000 + " " + " ".join(f"w{number}" for number in range(20)) + "\n\r\u202e"
    said = FEW.hint("me/shapes", long)
    assert said.endswith(" and 17 more: it makes circles")
    assert "x" * MOST_CHARS in said and "x" * (MOST_CHARS + 1) not in said
    assert said.isprintable()
