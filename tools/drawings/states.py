"""Diagrams of states, laid out from the tables of moves in the code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

from tools.drawings.canvas import LINE, PAD, WIDTH, Drawing, text_width, wrapped
from tools.drawings.names import callers, name_in, takes
from unfuse.core.request import REQUEST_MOVES
from unfuse.core.task import TASK_MOVES
from unfuse.transfer.session import SESSION_MOVES

Moves = Mapping[str, Set[str]]

COLOURS = ("blue", "amber", "violet", "green", "grey", "rose")
GAP = 34  # pixels between two states
TRACK = 20  # pixels between two lines beside the states
BOX = 420  # width of a state

REQUEST_TEXTS = {
    "queued": "Accepted. No stage has run yet.",
    "in_progress": "A stage runs, or has run.",
    "completed": "All results are stored.",
    "failed": "It has an error.",
    "cancelled": "Its client cancelled it.",
    "expired": "Its time is over.",
}
TASK_TEXTS = {
    "waiting": "An input does not exist, or was lost.",
    "queued": "All inputs exist. It waits for a worker.",
    "leased": "A worker runs it.",
    "announced": "Readers read its output while a worker writes it.",
    "done": "Its output exists, or its results are written.",
    "cancelled": "Its request ended before it was done.",
}
SESSION_TEXTS = {
    "bootstrapping": "Connects to the owner, also after a broken link.",
    "waiting_for_input": "Waits for room, or for bytes to be written.",
    "transferring": "Pulls chunks and verifies their checksums.",
    "success": "All bytes have arrived and are verified.",
    "failed": "Ended with one error.",
}


def groups_of(moves: Moves) -> list[list[str]]:
    """The states in the order of the table; last states that the same states lead to are one group."""
    sources = {state: frozenset(before for before in moves if state in moves[before]) for state in moves}
    groups: list[list[str]] = []
    for state in moves:
        last = groups[-1] if groups else []
        if last and not moves[state] and not moves[last[0]] and sources[state] == sources[last[0]]:
            last.append(state)
        else:
            groups.append([state])
    return groups


def _tracks(moves: Moves, groups: Sequence[Sequence[str]]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """By target, the sources of moves that go further down than one group, and of those that go up."""
    place = {state: number for number, group in enumerate(groups) for state in group}
    down, up = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
    for state, targets in moves.items():
        for target in targets:
            if place[target] > place[state] + 1:
                down[place[target]].add(place[state])
            elif place[target] < place[state]:
                up[place[target]].add(place[state])
    return {to: sorted(down[to]) for to in sorted(down)}, {to: sorted(up[to]) for to in sorted(up, reverse=True)}


def diagram(title: str, description: str, moves: Moves, texts: Mapping[str, str]) -> Drawing:
    """Draw the states from top to bottom. Moves further down are on the right side, moves up on the left."""
    if missing := {*moves, *(target for targets in moves.values() for target in targets)} ^ texts.keys():
        raise LookupError(f"{title}: the states and their texts differ in {', '.join(sorted(missing))}")
    drawing = Drawing(title, description)
    groups = groups_of(moves)
    colours = {number: COLOURS[number % len(COLOURS)] for number in range(len(groups))}
    left, right = (WIDTH - BOX) / 2, (WIDTH + BOX) / 2
    tops, bottoms = list[float](), list[float]()
    top = float(PAD)
    for number, group in enumerate(groups):
        if len(group) > 1:
            bottom = _group(drawing, group, top, colours[number], texts)
        else:
            lines = wrapped("note", texts[group[0]], BOX - 24)
            bottom = top + 20 + LINE * (1 + len(lines))
            border = 1.5 if moves[group[0]] else 3.5
            content = [("name", group[0]), *(("note", line) for line in lines)]
            drawing.box((left, top, right, bottom), colours[number], content, border=border)
        tops.append(top)
        bottoms.append(bottom)
        top = bottom + GAP
    drawing.height = bottoms[-1] + PAD

    for number in range(1, len(groups)):
        if any(groups[number][0] in moves[state] for state in groups[number - 1]):
            drawing.arrow([(WIDTH / 2, bottoms[number - 1]), (WIDTH / 2, tops[number])], colours[number])
    spans = {number: _span(group, left, right) for number, group in enumerate(groups)}
    ports = _Ports(tops, bottoms, moves, groups)
    down, up = _tracks(moves, groups)
    for side, tracks in ((1, down), (-1, up)):
        for lane, (target, sources) in enumerate(tracks.items()):
            edge = right if side > 0 else left
            x = edge + side * (TRACK * (lane + 1) + 4)
            y = ports.arrival(side, target)
            rows = [ports.departure(side, source, target) for source in sources]
            for row in rows:
                drawing.line([(edge, row), (x, row)], colours[target])
                drawing.dot(x, row, colours[target], 3)
            drawing.line([(x, min([y, *rows])), (x, max([y, *rows]))], colours[target])
            inner = spans[target][1 if side > 0 else 0]
            if (inner - x) * side >= 0:  # a wide group: the line ends on its upper edge
                drawing.arrow([(x, y), (x, tops[target])], colours[target])
            else:
                drawing.arrow([(x, y), (edge, y)], colours[target])
    return drawing


def _span(group: Sequence[str], left: float, right: float) -> tuple[float, float]:
    """The left and right edge of a state or group."""
    return (left, right) if len(group) == 1 else (float(PAD), float(WIDTH - PAD))


class _Ports:
    """The heights at which lines leave and reach the states, each line its own."""

    def __init__(
        self, tops: Sequence[float], bottoms: Sequence[float], moves: Moves, groups: Sequence[Sequence[str]]
    ) -> None:
        self._tops, self._bottoms, self._groups = tops, bottoms, groups
        down, up = _tracks(moves, groups)
        self._down, self._up = down, up

    def _lines(self, side: int, number: int) -> list[tuple[str, int]]:
        tracks = self._down if side > 0 else self._up
        leaving = [("to", target) for target, sources in tracks.items() if number in sources]
        reaching = [("from", number)] if number in tracks else []
        ordered = sorted(leaving, key=lambda line: line[1], reverse=True)
        return [*ordered, *reaching] if side < 0 else [*reaching, *reversed(ordered)]

    def _height(self, side: int, number: int, line: tuple[str, int]) -> float:
        lines = self._lines(side, number)
        top, bottom = self._tops[number], self._bottoms[number]
        return top + (bottom - top) * (lines.index(line) + 1) / (len(lines) + 1)

    def departure(self, side: int, number: int, target: int) -> float:
        """Where the line to a target leaves a state."""
        return self._height(side, number, ("to", target))

    def arrival(self, side: int, number: int) -> float:
        """Where the line to a state arrives: a group is reached from above."""
        if len(self._groups[number]) > 1:
            return self._tops[number] - GAP / 2
        return self._height(side, number, ("from", number))


def _group(drawing: Drawing, group: Sequence[str], top: float, colour: str, texts: Mapping[str, str]) -> float:
    """Draw last states side by side. Returns the lower edge."""
    gap = 12
    width = (WIDTH - 2 * PAD - gap * (len(group) + 1)) / len(group)
    lines = {state: wrapped("note", texts[state], width - 16) for state in group}
    top += gap
    bottom = top + 20 + LINE * (1 + max(map(len, lines.values())))
    drawing.rect((PAD, top - gap, WIDTH - PAD, bottom + gap), "grey", dashed=True)
    for number, state in enumerate(group):
        left = PAD + gap + number * (width + gap)
        content = [("name", state), *(("note", line) for line in lines[state])]
        if text_width("name", state) > width:
            raise ValueError(f"{state} does not fit")
        drawing.box((left, top, left + width, bottom), colour, content, border=3.5)
    return bottom + gap


def lease_texts() -> dict[str, str]:
    """The states of a lease, with the operations of the queue that lead to each, as the memory queue calls them."""
    file, queue = "queues/memory.py", "MemoryQueue"
    begins = callers(file, queue, "_leases.add")
    ends = {name for name in callers(file, queue, "_leases.end") if takes(file, f"{queue}.{name}", "claim", "change")}
    renews = callers(file, queue, "_leases.renew") | callers(file, queue, "_leases.expired")
    expires = callers(file, queue, "_leases.expire_worker")
    for name in begins | ends | renews | expires:
        name_in("queues/base.py", f"{_port_of(name)}.{name}")
    return {
        "leased": f"Begins by {_listed(begins)}. Extended by {_listed(renews)}.",
        "expired": f"Its time has passed, or by {_listed(expires)}. Reports are still accepted.",
        "ended": f"By {_listed(ends)}. Later reports are refused.",
    }


def _port_of(name: str) -> str:
    """The class of the port that has this operation."""
    for port in ("TaskQueue", "RequestStore", "WorkerRegistry"):
        try:
            name_in("queues/base.py", f"{port}.{name}")
        except LookupError:
            continue
        return port
    raise LookupError(f"no port of unfuse/queues/base.py has {name}")


def _listed(names: Set[str]) -> str:
    """Names in a sentence."""
    *first, last = sorted(names)
    return f"{', '.join(first)} or {last}" if first else last


LEASE_MOVES: Moves = {"leased": {"expired", "ended"}, "expired": {"leased", "ended"}, "ended": set()}
"""A lease has no status: these are its moves by `Leases` in unfuse/queues/tasks.py, whose methods are looked up."""


def request_states(moves: Moves = REQUEST_MOVES, texts: Mapping[str, str] = REQUEST_TEXTS) -> Drawing:
    """The states of a request, by REQUEST_MOVES."""
    return diagram("States of a request", _sentence(moves), moves, texts)


def task_states(moves: Moves = TASK_MOVES, texts: Mapping[str, str] = TASK_TEXTS) -> Drawing:
    """The states of a task, by TASK_MOVES."""
    return diagram("States of a task", _sentence(moves), moves, texts)


def lease_states(moves: Moves = LEASE_MOVES, texts: Mapping[str, str] | None = None) -> Drawing:
    """The states of a lease, by the operations of the queue."""
    for method in ("add", "renew", "expire_worker", "expired", "end"):
        name_in("queues/tasks.py", f"Leases.{method}")
    return diagram("States of a lease", _sentence(moves), moves, lease_texts() if texts is None else texts)


def transfer_states(moves: Moves = SESSION_MOVES, texts: Mapping[str, str] = SESSION_TEXTS) -> Drawing:
    """The states of a transfer session, by SESSION_MOVES."""
    return diagram("States of a transfer session", _sentence(moves), moves, texts)


def _sentence(moves: Moves) -> str:
    """All moves in words, for readers who do not see the drawing."""
    return " ".join(
        f"{state}: to {', '.join(target for target in moves if target in moves[state])}."
        if moves[state]
        else f"{state}: last."
        for state in moves
    )
