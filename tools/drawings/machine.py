"""The processes and the memory of one machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tools.drawings.canvas import LINE, PAD, WIDTH, Drawing
from tools.drawings.names import defined, name_in, text_in
from unfuse.service.groups import ServeSettings

WORKER = 306  # width of a worker
TITLE = "Processes and memory of one machine"
DESCRIPTION = (
    "unfuse serve is one process with gateway, scheduler and queue. It starts the workers and the fork server. Each "
    "worker has a parent process, which owns an arena of shared memory, and a compute process, which writes its arena "
    "and maps the arenas of other workers. The queue is a file; results are in a folder; a store that spills moves "
    "unused objects from arenas to a disk."
)


def names() -> dict[str, str]:
    """Everything that the drawing shows of the code, looked up."""
    for file, name in (
        ("server/gateway.py", "Gateway"),
        ("scheduler/scheduler.py", "Scheduler"),
        ("launch/local.py", "LocalLauncher"),
        ("launch/local.py", "ForkServers"),
        ("wire/run_folder.py", "open_run_folder"),
        ("stores/spill.py", "SpillBackend"),
        ("worker/executor.py", "Executor"),
    ):
        defined(file, name)
    defaults = ServeSettings()
    return {
        "queue": defaults.queue,
        "results": defaults.results,
        "arena": text_in("arena/arena.py", "unfuse-arena"),
        "spill": text_in("service/groups.py", "spill:shared_memory+disk:PATH"),
        "to parent": name_in("core/messages.py", "ToWorker"),
        "to scheduler": name_in("core/messages.py", "ToScheduler"),
        "to compute": name_in("worker/compute_messages.py", "ToCompute"),
        "from compute": name_in("worker/compute_messages.py", "FromCompute"),
        "fork": name_in("worker/fork_server.py", "Fork"),
    }


def machine(of: Callable[[], Mapping[str, str]] = names) -> Drawing:
    """Draw server and fork server above two workers, and the disk below them."""
    shown = of()
    drawing = Drawing(TITLE, DESCRIPTION)
    right = WIDTH - PAD
    serve = (PAD, 28, 368, 132)
    content = [("title", "unfuse serve"), ("plain", "gateway, scheduler, queue"), ("note", "restarts workers that die")]
    drawing.box(serve, "blue", content)
    drawing.box((448, 24, right, 78), "amber", [("title", "queue"), ("small", shown["queue"])])
    drawing.arrow([(368, 52), (448, 52)], "blue")
    fork = [("title", "fork server"), ("note", "on CPUs only")]
    drawing.box((448, 88, right, 140), "violet", fork)
    drawing.arrow([(368, 114), (448, 114)], "blue")

    top = 226
    workers = (PAD, top, right, top + 250)
    drawing.rect(workers, "panel", dashed=True)
    drawing.arrow([(140, 132), (140, top)], "blue")
    drawing.text(152, 166, "small", f"{shown['to parent']}, {shown['to scheduler']}")
    drawing.text(152, 166 + LINE, "note", "sockets in the run folder")
    drawing.arrow([(572, 140), (572, top)], "violet")
    drawing.text(560, 166, "small", shown["fork"], "end")
    drawing.text(560, 166 + LINE, "note", "forks compute processes", "end")

    for number, left in enumerate((PAD + 16, WIDTH / 2 + 14)):
        _worker(drawing, number, left, top + 16, shown)
    drawing.arrow([(PAD + 16 + WORKER, top + 176), (WIDTH / 2 + 14, top + 176)], "green")
    drawing.text(124, top + 234, "note", "writes its own arena, maps others read-only")

    bottom = top + 250 + 82
    results = [("title", "results"), ("small", shown["results"]), ("note", "read by the gateway")]
    drawing.box((PAD, bottom, 280, bottom + 84), "amber", results)
    spill = [("title", "spill (optional)"), ("small", shown["spill"])]
    drawing.box((304, bottom, right, bottom + 84), "amber", spill)
    drawing.arrow([(104, top + 208), (104, bottom)], "green")
    drawing.text(116, bottom - 50, "note", "the last stage")
    drawing.text(116, bottom - 50 + LINE, "note", "stores its files")
    drawing.arrow([(430, top + 250), (430, bottom)], "green")
    drawing.text(442, bottom - 50, "note", "unused objects of an arena")
    drawing.text(442, bottom - 50 + LINE, "note", "that fills")
    drawing.height = bottom + 84 + PAD
    return drawing


def _worker(drawing: Drawing, number: int, left: float, top: float, shown: Mapping[str, str]) -> None:
    """Draw a worker: its parent, its compute process and its arena."""
    right = left + WORKER
    parent = [("title", f"worker {number + 1}: parent"), ("note", "no torch; leases, reports, transfers")]
    drawing.box((left, top, right, top + 60), "blue", parent)
    middle = left + WORKER / 2
    lower = (top + 128, top + 192)
    drawing.arrow([(left + 30, top + 60), (left + 30, lower[0])], "blue")
    drawing.text(left + 40, top + 88, "small", shown["to compute"])
    drawing.text(left + 40, top + 88 + LINE, "small", shown["from compute"])
    drawing.arrow([(right - 30, top + 60), (right - 30, lower[0])], "blue")
    drawing.text(right - 40, top + 98, "note", "owns", "end")
    drawing.box((left, lower[0], middle - 18, lower[1]), "violet", [("title", "compute"), ("note", "torch, weights")])
    drawing.box((middle + 18, lower[0], right, lower[1]), "green", [("title", "arena"), ("small", shown["arena"])])
    drawing.arrow([(middle - 18, top + 160), (middle + 18, top + 160)], "green")
