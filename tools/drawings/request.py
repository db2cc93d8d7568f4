"""The life of a request, as a sequence of messages between processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tools.drawings.canvas import LINE, PAD, WIDTH, Drawing, wrapped
from tools.drawings.names import member, name_in, text_in
from unfuse.core.messages import ToScheduler, ToWorker
from unfuse.core.request import EventType
from unfuse.worker.compute_messages import FromCompute, ToCompute

CLIENT, GATEWAY, SCHEDULER, PARENT, COMPUTE, RESULTS = range(6)
LANES = (
    ("Client",),
    ("Gateway",),
    ("Scheduler", "and queue"),
    ("Worker", "parent"),
    ("Compute", "process"),
    ("Result", "store"),
)
LABELS = 252  # width of the column with the messages
HEAD = 56
TITLE = "The life of a request"
LOOP = "for each task, until the last stage"

#: Which messages may pass from one lane to another: each is looked up in its union.
UNIONS = {
    (PARENT, SCHEDULER): ToScheduler,
    (SCHEDULER, PARENT): ToWorker,
    (PARENT, COMPUTE): ToCompute,
    (COMPUTE, PARENT): FromCompute,
}


class Step(NamedTuple):
    """A message, or a call."""

    source: int
    target: int
    name: str
    note: str
    repeated: bool = False


def message(source: int, target: int, name: str, note: str, *, repeated: bool = True) -> Step:
    """A step by a message, which its union must have."""
    return Step(source, target, member(UNIONS[source, target], name), note, repeated)


def queue(name: str) -> str:
    """The name of an operation of the queue."""
    return name_in("queues/base.py", name)


def event(name: str) -> str:
    """The type of an event."""
    return member(EventType, name)


def steps() -> list[Step]:
    """All steps in order, with names from the code."""
    route = text_in("server/images.py", "/images/generations")
    prefix = text_in("server/app.py", "/v1")
    stored = name_in("stores/results.py", "ResultStore.put")
    read = name_in("stores/results.py", "ResultStore.read")
    submit, watch = queue("TaskQueue.submit"), queue("RequestStore.watch")
    lease, progress, commit = queue("TaskQueue.lease"), queue("TaskQueue.progress"), queue("TaskQueue.commit_and_lease")
    ended = name_in("core/messages.py", "HeartbeatReply.ended_requests")
    return [
        Step(CLIENT, GATEWAY, f"POST {prefix}{route}", "parameters are checked"),
        Step(GATEWAY, SCHEDULER, f"{submit}()", f"plan, first tasks; event {event('queued')}"),
        message(PARENT, SCHEDULER, "RequestTasks", f"calls {lease}()"),
        message(SCHEDULER, PARENT, "LeasesGranted", "a lease for each task"),
        message(PARENT, COMPUTE, "RunTask", "inputs are read by object ref"),
        message(COMPUTE, PARENT, "StepProgress", "after each step"),
        message(PARENT, SCHEDULER, "ReportProgress", f"{progress}(): event {event('progress')}"),
        Step(COMPUTE, RESULTS, f"{stored}()", "the last stage stores its files", True),
        message(COMPUTE, PARENT, "TaskCompleted", "the output is in the arena"),
        message(PARENT, SCHEDULER, "TaskCompleted", f"{commit}() queues the next tasks"),
        Step(SCHEDULER, GATEWAY, f"{watch}()", f"event {event('completed')}"),
        Step(GATEWAY, RESULTS, f"{read}()", "the files of the results"),
        Step(GATEWAY, CLIENT, "200", "pictures or links"),
        message(SCHEDULER, PARENT, "HeartbeatReply", f"{ended}: frees objects", repeated=False),
    ]


def life(of: Callable[[], Sequence[Step]] = steps) -> Drawing:
    """Draw a row for each step: its name, and its arrow between the lanes."""
    rows = of()
    drawing = Drawing(TITLE, " ".join(f"{number}. {_sentence(step)}" for number, step in enumerate(rows, 1)))
    first = LABELS + 62
    spacing = (WIDTH - PAD - 30 - first) / (len(LANES) - 1)
    places = [first + number * spacing for number in range(len(LANES))]
    notes = [wrapped("note", step.note, LABELS) for step in rows]
    heights = [28 + 20 * len(lines) for lines in notes]
    top = PAD + HEAD
    loop = [number for number, step in enumerate(rows) if step.repeated]

    bottom = top
    tops = []
    for number in range(len(rows)):
        if number in (loop[0], loop[-1] + 1):
            bottom += 28 if number == loop[0] else 10
        tops.append(bottom)
        bottom += heights[number]
    drawing.height = bottom + PAD

    loop_area = (PAD - 12, tops[loop[0]] - 24, WIDTH - PAD + 12, tops[loop[-1]] + heights[loop[-1]] + 4)
    drawing.rect(loop_area, "grey", dashed=True)
    drawing.text(PAD, loop_area[1] + 18, "note", LOOP)
    for place, names in zip(places, LANES, strict=True):
        for number, name in enumerate(names):
            drawing.text(place, PAD + 18 + LINE * number - (9 if len(names) > 1 else 0) + 4, "note", name, "middle")
        drawing.line([(place, top - 8), (place, drawing.height - PAD)], "lane")
    for number, (step, lines, y) in enumerate(zip(rows, notes, tops, strict=True), 1):
        _row(drawing, (number, step, lines), y, places)
    return drawing


def _row(drawing: Drawing, row: tuple[int, Step, Sequence[str]], top: float, places: Sequence[float]) -> None:
    """Draw one step, with its number and the lines of its note."""
    number, step, lines = row
    drawing.text(PAD + 22, top + 20, "title", f"{number}", "end")
    drawing.text(PAD + 32, top + 20, "code", step.name)
    for place, line in enumerate(lines):
        drawing.text(PAD + 32, top + 40 + 20 * place, "note", line)
    middle = top + 25
    colour = "green" if RESULTS in (step.source, step.target) else "blue" if step.target > step.source else "violet"
    drawing.dot(places[step.source], middle, colour)
    drawing.arrow([(places[step.source], middle), (places[step.target], middle)], colour)


def _sentence(step: Step) -> str:
    """A step in words."""
    source, target = (" ".join(LANES[lane]).lower() for lane in (step.source, step.target))
    return f"{source.capitalize()} to {target}: {step.name}, {step.note}."
