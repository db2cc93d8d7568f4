"""The pages of references are those of the code, and each code of an error is explained."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tools.references import ADVICE, DOCS, NOT_USED, PAGES, refusals
from unfuse.core.modalities import MODALITIES


@pytest.mark.parametrize(("name", "page"), PAGES.items(), ids=PAGES)
def test_reference_page_matches_the_code(name: str, page: Callable[[], str]) -> None:
    assert DOCS.joinpath(name).read_text() == page(), "run: python -m tools.references"


def test_every_error_code_is_documented() -> None:
    assert refusals().keys() == ADVICE.keys()
    assert refusals()["too_many_connections"] == {429, 503}
    assert all(says.endswith(".") for says in ADVICE.values())


def test_every_effective_parameter_is_documented() -> None:
    page = DOCS.joinpath("parameters.md").read_text()
    for one in (
        one for medium in MODALITIES for one in medium.parameters if one.use not in NOT_USED and one.flag is not None
    ):
        assert one.description, one.name
        assert f"| `{one.name}`" in page
