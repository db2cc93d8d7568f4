"""The built-in model's tokenizer: forgiving about spelling, and equal to what the pipeline feeds."""

import numpy as np

from tools.shapes import scenes
from tools.shapes.words import MAX_TOKENS, RESERVED, TEMPLATES, CaptionTable, make_tokenizer


def test_case_articles_marks_and_british_spelling_do_not_matter() -> None:
    tokenizer = make_tokenizer()

    assert tokenizer("An ORANGE Star, on grey!").input_ids == tokenizer("a orange star on gray").input_ids


def test_only_unknown_words_become_the_unknown_token() -> None:
    tokenizer = make_tokenizer()
    known = " ".join([*scenes.COLOURS, *scenes.SHAPES, *scenes.GROUNDS, *RESERVED])

    assert tokenizer.unk_token_id not in tokenizer(known).input_ids
    assert tokenizer("a zebra").input_ids[1] == tokenizer.unk_token_id


def test_words_of_a_later_model_are_reserved() -> None:
    assert {"left", "right", "above", "below", "moving", "up", "down"} <= set(RESERVED)


def test_every_wording_of_every_caption_fits() -> None:
    table = CaptionTable(make_tokenizer())

    assert table.tokens.shape == (len(TEMPLATES) * 108 + 1, MAX_TOKENS)
    assert (table.mask.sum(dim=1) < MAX_TOKENS).all()
    assert table.tokens[-1].tolist() == [1] + [0] * (MAX_TOKENS - 1)


def test_captions_are_reworded_and_dropped_as_often_as_asked() -> None:
    table = CaptionTable(make_tokenizer())
    rows = table.rows(["an orange ring on gray"] * 2000)

    varied = table.vary(rows, np.random.default_rng(0), reworded=0.2, dropped=0.1)

    assert np.array_equal(table.vary(rows, np.random.default_rng(0), reworded=0, dropped=0), rows)
    assert np.isclose((varied == len(table.tokens) - 1).mean(), 0.1, atol=0.03)
    assert np.isclose((varied == rows).mean(), 0.8 * 0.9, atol=0.04)
    assert set(varied[varied != len(table.tokens) - 1] % 108) == {rows[0]}
