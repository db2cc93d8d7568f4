"""The built-in model's tokenizer: forgiving about spelling, and equal to what the pipeline feeds."""

import numpy as np
import pytest

from tools.shapes import scenes
from tools.shapes.words import MAX_TOKENS, PLACES, Wordings, make_tokenizer, wordings


def test_tokenizer_ignores_case_articles_punctuation_and_spelling() -> None:
    tokenizer = make_tokenizer()

    assert tokenizer("An ORANGE Star, on grey!").input_ids == tokenizer("a orange star on gray").input_ids


def test_only_unknown_words_map_to_the_unknown_token() -> None:
    tokenizer = make_tokenizer()
    known = " ".join([*scenes.COLOURS, *scenes.SHAPES, *scenes.GROUNDS, *PLACES])

    assert tokenizer.unk_token_id not in tokenizer(known).input_ids
    assert tokenizer("a zebra").input_ids[1] == tokenizer.unk_token_id


@pytest.mark.parametrize("kind", scenes.KINDS)
def test_all_wordings_fit_max_tokens_and_the_first_is_the_caption(kind: str) -> None:
    tokenizer = make_tokenizer()
    drawn = scenes.scenes(kind, 100, seed=0)
    table = Wordings(tokenizer, drawn)

    assert table.tokens.shape[1] == MAX_TOKENS
    assert (table.tokens == tokenizer.eos_token_id).any(dim=1).all(), "none was cut off"
    assert table.tokens[table.row("")].tolist() == [1] + [0] * (MAX_TOKENS - 1)
    for scene in drawn:
        assert tokenizer(wordings(scene)[0]).input_ids == tokenizer(scene.caption).input_ids


def test_captions_are_reworded_and_dropped_at_the_given_rates() -> None:
    drawn = scenes.scenes("relation", 50, seed=1)
    table = Wordings(make_tokenizer(), drawn)
    which = np.random.default_rng(1).integers(50, size=4000)
    firsts = np.array([table.row(wordings(drawn[index])[0]) for index in which])

    varied = table.vary(which, np.random.default_rng(0), reworded=0.2, dropped=0.1)

    assert np.array_equal(table.vary(which, np.random.default_rng(0), reworded=0, dropped=0), firsts)
    assert np.isclose((varied == table.row("")).mean(), 0.1, atol=0.03)
    assert np.isclose((varied == firsts).mean(), 0.8 * 0.9, atol=0.04)
    assert all(
        row == table.row("") or row in [table.row(text) for text in wordings(drawn[index])]
        for row, index in zip(varied[:200], which, strict=False)
    )
