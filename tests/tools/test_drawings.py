"""The drawings of the documentation are those of the code, and can be read on light and on dark pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace as replace_struct

from tools.drawings import DRAWINGS, FOLDER
from tools.drawings.canvas import FILLS, INKS, TEXTS, Drawing
from tools.drawings.layers import layers
from tools.drawings.machine import machine, names
from tools.drawings.names import defined, member, name_in, text_in
from tools.drawings.pools import flow, flux
from tools.drawings.request import PARENT, SCHEDULER, Step, life, message, steps
from tools.drawings.states import (
    LEASE_MOVES,
    REQUEST_TEXTS,
    SESSION_TEXTS,
    TASK_TEXTS,
    lease_states,
    lease_texts,
    request_states,
    task_states,
    transfer_states,
)
from tools.house import used
from unfuse.core.messages import ToScheduler
from unfuse.core.request import REQUEST_MOVES
from unfuse.core.task import TASK_MOVES
from unfuse.transfer.session import SESSION_MOVES

DOCS = FOLDER.parent
SVG = "{http://www.w3.org/2000/svg}"
CHARTS = {
    "request": (request_states, REQUEST_MOVES, REQUEST_TEXTS),
    "task": (task_states, TASK_MOVES, TASK_TEXTS),
    "lease": (lease_states, LEASE_MOVES, lease_texts()),
    "transfer": (transfer_states, SESSION_MOVES, SESSION_TEXTS),
}

Chart = Callable[[Mapping[str, Set[str]], Mapping[str, str]], Drawing]


def luminance(colour: str) -> float:
    """The relative luminance of a colour like #1b1f24, as WCAG defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, from 1 to 21."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawing_is_that_of_the_code(name: str) -> None:
    assert FOLDER.joinpath(f"{name}.svg").read_text() == DRAWINGS[name]().svg(), "run: python -m tools.drawings"


def test_every_drawing_is_in_a_page_with_a_text() -> None:
    pages = [page.read_text() for page in DOCS.rglob("*.md")]
    shown = {
        Path(path).stem: text for page in pages for text, path in re.findall(r"!\[([^\]]*)\]\(([^)]+\.svg)\)", page)
    }
    assert shown.keys() == DRAWINGS.keys() == {path.stem for path in FOLDER.glob("*.svg")}
    assert all(len(text.split()) >= 5 for text in shown.values())


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawing_has_title_and_description_and_no_small_text(name: str) -> None:
    root = ElementTree.fromstring(FOLDER.joinpath(f"{name}.svg").read_text())
    title, description = root.findtext(f"{SVG}title"), root.findtext(f"{SVG}desc")
    assert title and description and len(description) > len(title)
    assert {text.get("class") for text in root.iter(f"{SVG}text")} <= TEXTS.keys()
    assert min(size for size, *_ in TEXTS.values()) >= 13
    assert int(root.get("width", "0")) == 720


@pytest.mark.parametrize(("ink", "fill", "page"), list(product(INKS, FILLS, (0, 1))))
def test_texts_have_enough_contrast(ink: str, fill: str, page: int) -> None:
    assert contrast(INKS[ink][page], FILLS[fill][page]) >= 4.5


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize(("chart", "moves", "texts"), CHARTS.values(), ids=CHARTS)
def test_states_are_those_of_the_table(chart: Chart, moves: Mapping[str, Set[str]], texts: Mapping[str, str]) -> None:
    first = next(iter(moves))
    renamed = {"asleep" if state == first else state: {*targets} for state, targets in moves.items()}
    for targets in renamed.values():
        if first in targets:
            targets.symmetric_difference_update({first, "asleep"})
    with pytest.raises(LookupError, match="asleep"):
        chart(renamed, texts)
    shown = chart(renamed, {"asleep" if state == first else state: text for state, text in texts.items()})
    assert "asleep" in [text for text, _ in shown.texts]
    assert first not in [text for text, _ in shown.texts]

    added = chart({**moves, "paused": {first}}, {**texts, "paused": "It is paused."})
    assert added.lines != chart(moves, texts).lines
    last = list(moves)[-2]
    assert chart({**moves, last: {*moves[last]} ^ {first}}, texts).lines != chart(moves, texts).lines


def test_tables_in_the_page_of_states_have_every_move_of_the_code() -> None:
    sections = re.split(r"^## ", DOCS.joinpath("concepts", "states.md").read_text(), flags=re.MULTILINE)[1:]
    for section, moves in zip(sections, (REQUEST_MOVES, TASK_MOVES, LEASE_MOVES), strict=True):
        rows = re.findall(r"^\| (`.*?) \| (`\w+`) \|", section, re.MULTILINE)
        listed = [(state.strip("`"), target.strip("`")) for states, target in rows for state in states.split(", ")]
        assert sorted(listed) == sorted((state, target) for state in moves for target in moves[state])


def test_lease_is_drawn_from_the_calls_of_the_memory_queue() -> None:
    texts = lease_texts()
    assert "commit_and_lease or lease" in texts["leased"]
    assert "renew or sweep_expired" in texts["leased"]
    assert "unregister" in texts["expired"]
    assert "commit, commit_and_lease, hand_back or refuse" in texts["ended"]


def test_names_that_the_code_does_not_have_are_refused() -> None:
    assert name_in("queues/base.py", "TaskQueue.lease") == "lease"
    with pytest.raises(LookupError, match="TaskQueue.borrow"):
        name_in("queues/base.py", "TaskQueue.borrow")
    with pytest.raises(LookupError, match="Nothing"):
        defined("core/messages.py", "Nothing")
    with pytest.raises(LookupError, match="RunTask"):
        member(ToScheduler, "RunTask")
    with pytest.raises(LookupError, match="no string"):
        text_in("server/images.py", "/images/dreams")


def test_messages_of_a_request_pass_between_their_processes() -> None:
    with pytest.raises(LookupError):
        message(PARENT, SCHEDULER, "LeasesGranted", "")
    assert "LeasesGranted" in [text for text, _ in life().texts]
    renamed = [step._replace(name="AskForTasks") if step.name == "RequestTasks" else step for step in steps()]
    shown = [text for text, _ in life(lambda: renamed).texts]
    assert "AskForTasks" in shown and "RequestTasks" not in shown
    assert len(life(lambda: [*steps(), Step(0, 1, "more", "more")]).lines) == len(life().lines) + 1


def test_machine_shows_the_default_addresses() -> None:
    assert names()["queue"] in [text for text, _ in machine().texts]
    assert "redis:" in [text for text, _ in machine(lambda: {**names(), "queue": "redis:"}).texts]


def test_pools_are_those_of_the_family() -> None:
    shown = [text for text, _ in flow().texts]
    assert {stage.name for stage in flux().pipeline.stages} <= {*shown, "text_encode_2"}
    spec = flux()
    stages = tuple(replace_struct(stage, slots=1) for stage in spec.pipeline.stages)
    single = flow(replace_struct(spec, pipeline=replace_struct(spec.pipeline, stages=stages)))
    assert "than 8 tasks wait" in shown
    assert [text for text, _ in single.texts].count("than 4 tasks wait") == 2
    assert "vae_decode" in single.description


def test_layers_are_those_of_the_imports() -> None:
    assert {folder for folder in used()} <= {text for text, _ in layers().texts}
    shown = layers({"roof": {"walls"}, "walls": {"floor"}, "floor": set()})
    heights = {text: area[1] for text, area in shown.texts}
    assert heights["roof"] < heights["walls"] < heights["floor"]


def test_drawing_with_a_fault_is_refused() -> None:
    drawing = Drawing("Faults", "", height=100)
    drawing.text(30, 40, "plain", "one text")
    crossed = replace(drawing, lines=[((0, 38), (200, 38))])
    with pytest.raises(ValueError, match="a line crosses 'one text'"):
        crossed.svg()
    drawing.text(40, 44, "plain", "another")
    with pytest.raises(ValueError, match="overlap"):
        drawing.svg()
    with pytest.raises(ValueError, match="leaves the drawing"):
        drawing.text(700, 40, "plain", "too far to the right")
    with pytest.raises(ValueError, match="does not fit"):
        drawing.box((0, 0, 50, 40), "blue", [("plain", "a long text")])
