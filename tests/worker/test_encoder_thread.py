"""Files are encoded beside the thread that computes: what goes on meanwhile, and how a task ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.worker.test_ranks import Group, group
from tests.worker.test_step_loop import Bench, Count
from tools.server import until
from unfuse.core.compute_device import ComputeDevice
from unfuse.core.errors import NotFound, PermanentError
from unfuse.core.messages import StepProgress, TaskCompleted, TaskFailed, TaskStopped
from unfuse.core.task import Claim
from unfuse.stages.base import EncodedMedia, StageInput, StageOutput, SteppedStage
from unfuse.stores.results import fragment_name
from unfuse.worker.compute_messages import CancelTask
from unfuse.worker.encoder_thread import MAX_UNENCODED
from unfuse.worker.step_loop import StepLoop

__all__ = ["group"]
WAIT_S = 60.0


@dataclass
class Film:
    """A task: its frames that are decoded and not encoded, and those that are encoded."""

    task: StageInput
    done: int = 0
    frames: deque[int] = field(default_factory=deque)
    encoded: list[int] = field(default_factory=list)
    released: bool = False


class Draw(SteppedStage[Film]):
    """Decodes a frame at each step; another thread encodes it once it may. The frame `bad` cannot be encoded."""

    kind = "vae_decode"
    encodes = True

    def __init__(self) -> None:
        self.may_encode, self.begun = threading.Event(), threading.Event()
        self.may_encode.set()
        self.threads: set[str] = set()
        self.films: list[Film] = []
        self.most = 0

    def verify(self, task: StageInput) -> None:
        """Takes anything."""

    def start(self, task: StageInput) -> Film:
        self.films.append(Film(task))
        return self.films[-1]

    def step(self, batch: Sequence[Film]) -> list[Film]:
        for film in batch:
            film.done += 1
            film.frames.append(film.done)
            self.most = max(self.most, len(film.frames))
        return [*batch]

    def progress(self, state: Film) -> tuple[int, int]:
        return state.done, int(state.task.params["steps"] or 0)

    def video_fragment(self, state: Film) -> bytes:
        assert not state.released
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        assert self.may_encode.wait(WAIT_S)
        frame = state.frames.popleft()
        if frame == state.task.params.get("bad"):
            raise PermanentError("the frame has an odd size")
        state.encoded.append(frame)
        return b"frame %d" % frame

    def discard_frames(self, state: Film) -> None:
        state.frames.clear()

    def finish(self, state: Film) -> StageOutput:
        while state.frames:
            self.video_fragment(state)
        return StageOutput(media=(EncodedMedia("text/plain", str(state.encoded).encode()),))

    def release(self, state: Film) -> None:
        assert not state.released
        state.released = True


def studio(folder: Path, batch: int = 1) -> tuple[Bench, Draw, Count]:
    draw, count = Draw(), Count()
    return Bench(folder, {"print": draw, "count": count}, batch), draw, count


def of(loop: Bench, claim: Claim) -> list[object]:
    return [message for message in loop.sent if getattr(message, "claim", None) == claim]


def test_other_tasks_are_computed_while_a_file_is_encoded(tmp_path: Path) -> None:
    """To their end, and the result of the file comes after that, with its steps reported in order."""
    loop, draw, _ = studio(tmp_path)
    draw.may_encode.clear()
    film = loop.run("print", steps=3)
    loop.turn()
    assert draw.begun.wait(WAIT_S)

    assert isinstance(loop.outcome(loop.run("count", steps=5)), TaskCompleted)
    assert not any(isinstance(message, TaskCompleted) for message in of(loop, film.claim))

    draw.may_encode.set()
    done = loop.outcome(film)
    assert isinstance(done, TaskCompleted)
    assert loop.results.read(film.task.request, 0) == b"[1, 2, 3]"
    assert done.timings.run_s >= done.timings.share_s
    reports = [message.step for message in of(loop, film.claim) if isinstance(message, StepProgress)]
    assert reports == sorted(reports)
    assert reports[-1] == 3
    assert isinstance(of(loop, film.claim)[-1], TaskCompleted)
    assert draw.threads == {"encoder_0"}
    assert draw.films[0].released


def test_task_waits_if_its_last_steps_are_not_encoded(tmp_path: Path) -> None:
    loop, draw, _ = studio(tmp_path)
    draw.may_encode.clear()
    film = loop.run("print", steps=6)
    for _ in range(MAX_UNENCODED):
        loop.turn()
    assert draw.begun.wait(WAIT_S)
    assert isinstance(loop.outcome(loop.run("count", steps=3)), TaskCompleted)
    assert draw.films[0].done == MAX_UNENCODED

    draw.may_encode.set()
    assert isinstance(loop.outcome(film), TaskCompleted)
    assert draw.most == MAX_UNENCODED


def test_cancelled_task_stops_once_its_frame_is_encoded_and_leaves_no_fragment(tmp_path: Path) -> None:
    loop, draw, _ = studio(tmp_path)
    film = loop.run("print", steps=9)
    loop.turn()
    until(lambda: loop.loop._jobs[film.claim].last_fragment_step == 1, "the first frame to be stored")
    assert loop.results.attached(film.task.request, fragment_name(1, 1)) == b"frame 1"
    draw.may_encode.clear()
    loop.turn()
    loop.inbox.put(CancelTask(film.claim))
    threading.Timer(0.05, draw.may_encode.set).start()

    assert isinstance(loop.outcome(film), TaskStopped)
    assert draw.films[0].released
    for step in range(1, 4):
        with pytest.raises(NotFound):
            loop.results.attached(film.task.request, fragment_name(1, step))
    assert isinstance(loop.outcome(loop.run("print", steps=2)), TaskCompleted)


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_error_of_the_encoder_fails_one_task_only(tmp_path: Path, bad: int) -> None:
    loop, draw, _ = studio(tmp_path, batch=2)
    films = [loop.run("print", steps=3, tag=1, bad=bad), loop.run("print", steps=3, tag=2)]
    failed, done = [loop.outcome(film) for film in films]

    assert isinstance(failed, TaskFailed)
    assert "the frame has an odd size" in failed.message
    assert isinstance(of(loop, films[0].claim)[-1], TaskFailed)
    assert isinstance(done, TaskCompleted)
    assert all(film.released for film in draw.films)
    assert not loop.loop._jobs


def test_loop_looks_for_leaks_after_the_last_file(tmp_path: Path) -> None:
    """It does so before it waits for messages."""

    class Checked(Exception):
        """A check after the end of the task, which ends the loop."""

    def check() -> None:
        if any(isinstance(message, TaskCompleted) for message in loop.sent):
            raise Checked

    def run() -> None:
        with pytest.raises(Checked):
            loop.loop.run()

    loop, _, _ = studio(tmp_path)
    loop.loop._leaks.check = check  # type: ignore[method-assign]
    loop.run("print", steps=2)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_only_the_first_rank_encodes(group: Callable[..., Group]) -> None:
    stages = Draw(), Draw()
    ranks = group(*stages)
    assert isinstance(ranks.outcome(ranks.begin(steps=4)), TaskCompleted)
    ranks.until(lambda: not ranks.loops[1]._jobs, "the other rank to end the task")
    assert stages[0].films[0].encoded == [1, 2, 3, 4]
    assert (stages[1].films[0].done, stages[1].films[0].encoded, stages[1].films[0].frames) == (4, [], deque())


def test_task_whose_encoding_fails_ends_on_all_ranks(group: Callable[..., Group]) -> None:
    stages = Draw(), Draw()
    ranks = group(*stages)
    assert isinstance(ranks.outcome(ranks.begin(steps=10**6, bad=2)), TaskFailed)
    assert isinstance(ranks.outcome(ranks.begin(steps=3)), TaskCompleted)
    ranks.until(lambda: not any(loop._jobs for loop in ranks.loops), "both ranks to end the tasks")
    assert all(film.released for stage in stages for film in stage.films)


def test_encoder_thread_selects_the_device_before_it_waits_for_pixels(tmp_path: Path) -> None:
    selecting = list[str]()
    draw = Draw()
    bench = Bench(tmp_path, {"print": draw}, 1)
    device = ComputeDevice()
    device.select = lambda: selecting.append(threading.current_thread().name)  # type: ignore[method-assign]
    own = bench.store, bench.results, bench.inbox, bench.sent.append
    bench.loop = StepLoop({"print": draw}, *own, 1, device=device)
    assert isinstance(bench.outcome(bench.run("print", steps=2)), TaskCompleted)
    assert selecting == [*draw.threads] == ["encoder_0"]
