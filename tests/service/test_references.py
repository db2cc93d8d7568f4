"""The pages of references are those of the code, and each code of an error is explained."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import typer.main
from msgspec.structs import fields

from tools import reference_http
from tools.pages import route_problems
from tools.reference_cli import EXAMPLES, commands
from tools.reference_errors import ADVICE, refusals
from tools.reference_events import WHEN, emitted, example_events, field_rows
from tools.reference_http import ANYWHERE, document, error_codes, routes, undescribed
from tools.reference_tables import DOCS
from tools.references import NOT_USED, PAGES
from unfuse.cli.app import app
from unfuse.core.modalities import MODALITIES
from unfuse.core.request import Event, EventType


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


def test_every_emitted_event_is_documented() -> None:
    assert emitted().keys() == WHEN.keys() == {*get_args(EventType)}
    assert {event.type for event in example_events()} <= WHEN.keys()


def test_every_field_of_an_event_has_a_meaning() -> None:
    assert [row[0] for row in field_rows()] == [f"`{field.name}`" for field in fields(Event)]
    assert all(row[-1] for row in field_rows())


def test_every_route_and_its_parameters_are_documented() -> None:
    documented = {(method.upper(), path) for path, methods in document()["paths"].items() for method in methods}
    assert {(route.method, route.path) for route in routes()} == documented
    assert list(undescribed()) == []


def test_every_error_code_belongs_to_a_route() -> None:
    placed = {code for route in routes() for code in error_codes(route)} | {*ANYWHERE}
    assert placed == ADVICE.keys()


def test_route_parameter_without_description_is_a_problem_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    route = next(route for route in routes() if route.path == "/v1/requests")
    bare = {"parameters": [{**route.operation["parameters"][0], "description": ""}]}
    monkeypatch.setattr(reference_http, "routes", lambda: [route._replace(operation=bare)])
    (problem,) = route_problems()
    assert str(problem).startswith("unfuse/server/requests.py:")
    assert problem.message == "the parameter status of /v1/requests has no description"


def test_every_command_has_an_example() -> None:
    root = typer.main.get_command(app)
    assert {name for name, _ in commands(root)} == EXAMPLES.keys()
    assert all(example.startswith(f"unfuse {name}") for name, example in EXAMPLES.items())
