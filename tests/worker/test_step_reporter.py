"""The overlapped loop: the same tokens as the normal one, told while the next ones are made."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace as changed
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.worker.test_ranks import Group, group
from tests.worker.test_step_loop import Bench, Large
from unfuse.core.compute_device import ComputeDevice
from unfuse.core.errors import PermanentError
from unfuse.core.messages import StepProgress, TaskCompleted, TaskFailed, TaskStopped
from unfuse.core.task import OutputDeltas
from unfuse.stages.base import EncodedMedia, StageInput, StageOutput, SteppedStage
from unfuse.worker.batch_invariance import InvarianceResults
from unfuse.worker.compute_messages import CancelTask, FromCompute
from unfuse.worker.step_loop import StepLoop

__all__ = ["group"]
WAIT_S = 60.0


@dataclass
class Said:
    """What was told of a text, which its later states share."""

    tokens: list[int] = field(default_factory=list)
    stopped: bool = False


@dataclass(frozen=True)
class Text:
    """A text: the tokens that were drawn, and what was told of them. It `gave` back what it has, or not."""

    task: StageInput
    tokens: list[int]
    said: Said = field(default_factory=Said)
    gave: list[bool] = field(default_factory=list)


class Talk(SteppedStage[Text]):
    """Draws tokens from what was drawn before. A text ends with token `end`, known when it is drawn, or where the sum
    of its tokens becomes `stop`, known when it is told; it fails where it tells, or draws, the number that it says.
    """

    kind = "decode"
    can_overlap = True

    def __init__(self, wait: Callable[[str], object] = lambda what: None) -> None:
        self.wait, self.busy = wait, list[Text]()
        self.started = self.left = 0

    def verify(self, task: StageInput) -> None:
        """Takes anything."""

    def start(self, task: StageInput) -> Text:
        self.started += 1
        return Text(task, [int(task.params["tag"] or 0)])

    def exact_batch_key(self, state: Text) -> int:
        return 0

    def step(self, batch: Sequence[Text]) -> list[int | Exception]:
        assert not any(state.gave for state in batch)
        self.busy, before = [*batch], [[*state.tokens] for state in batch]
        self.wait("compute")
        assert before == [state.tokens for state in batch]
        self.busy = []
        return [
            PermanentError("cannot draw") if len(tokens) == state.task.params.get("no_draw") else self.next(tokens)
            for state, tokens in zip(batch, before, strict=True)
        ]

    @staticmethod
    def next(tokens: list[int]) -> int:
        return (sum(tokens) * 31 + len(tokens)) % 17 + 1

    def advance(self, state: Text, result: int) -> Text:
        state.tokens.append(result)
        return changed(state)

    def progress(self, state: Text) -> tuple[int, int]:
        made = len(state.tokens) - 1
        over = state.said.stopped or (made and state.tokens[-1] == state.task.params.get("end"))
        return made, made if over else int(state.task.params["steps"] or 0)

    def new_chunks(self, state: Text) -> Sequence[bytes]:
        self.wait("grown")
        assert not state.gave
        told = len(state.said.tokens)
        if told == state.task.params.get("no_tell"):
            raise PermanentError("cannot tell")
        state.said.tokens.append(state.tokens[told + 1])
        state.said.stopped = sum(state.said.tokens) % 23 == state.task.params.get("stop")
        return [str(state.said.tokens[-1]).encode()]

    def finish(self, state: Text) -> StageOutput:
        return StageOutput(media=(EncodedMedia("text/plain", str(state.said.tokens).encode()),))

    def release(self, state: Text) -> None:
        assert not any(state.tokens is one.tokens for one in self.busy)
        assert not state.gave
        state.gave.append(True)
        self.left += 1


def alone(asked: dict[str, Any]) -> tuple[list[int], str]:
    """The tokens of a text, and how it ends, by the rules alone."""
    tokens, said = [asked["tag"]], list[int]()
    while len(said) < asked["steps"]:
        if len(tokens) == asked.get("no_draw"):
            return said, "TaskFailed"
        tokens.append(Talk.next(tokens))
        if len(said) == asked.get("no_tell"):
            return said, "TaskFailed"
        said.append(tokens[-1])
        if tokens[-1] == asked.get("end") or sum(said) % 23 == asked.get("stop"):
            break
    return said, "TaskCompleted"


def said_of(sent: Sequence[FromCompute], claim: object) -> list[int]:
    """The tokens that were told of a text, each in its place."""
    tokens = list[int]()
    for message in sent:
        if isinstance(message, OutputDeltas) and message.claim == claim:
            assert message.offset == len(tokens)
            tokens += map(int, message.deltas)
    return tokens


def end_of(sent: Sequence[FromCompute], claim: object) -> str:
    """How a text ended: nothing is said of it afterwards, and all of its steps before."""
    own = [message for message in sent if getattr(message, "claim", None) == claim]
    ends = [place for place, message in enumerate(own) if isinstance(message, TaskCompleted | TaskFailed | TaskStopped)]
    assert ends == [len(own) - 1]
    if isinstance(own[-1], TaskCompleted):
        assert max(message.step for message in own if isinstance(message, StepProgress)) == len(said_of(own, claim))
    return type(own[-1]).__name__


TEXTS = st.fixed_dictionaries(
    {"tag": st.integers(0, 50), "steps": st.integers(1, 12)},
    optional={
        "stop": st.integers(0, 22),
        "end": st.integers(1, 17),
        "priority": st.integers(0, 1),
        "no_draw": st.integers(1, 12),
        "no_tell": st.integers(0, 12),
    },
)
ARRIVALS = st.lists(st.tuples(st.integers(0, 12), TEXTS, st.none() | st.integers(0, 20)), min_size=1, max_size=6)


@pytest.mark.parametrize("overlapped", [False, True], ids=["normal", "overlapped"])
@pytest.mark.parametrize("exact", [False, True], ids=["batched", "exact"])
@settings(deadline=None)
@given(arrivals=ARRIVALS, seed=st.integers(0, 9))
def test_each_text_has_its_own_tokens_under_arrivals_and_cancels(
    arrivals: list[tuple[int, dict[str, Any], int | None]], seed: int, exact: bool, overlapped: bool
) -> None:
    """Given texts that come and are cancelled at any turn, when a loop of either kind makes them, then each has the
    tokens that it has by itself, a cancelled one the first of them; and what each has is given back, once."""
    chance = random.Random(seed)
    talk = Talk(lambda what: time.sleep(0.0005 * chance.randrange(3)) if overlapped else None)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), {"talk": talk}, 4, overlapped)
        if exact:
            own = bench.store, bench.results, bench.inbox, bench.sent.append
            sure = InvarianceResults(None, chance=lambda: 1.0)
            bench.loop = StepLoop({"talk": talk}, *own, 4, exactness=sure, overlapped=overlapped)
        bench.loop._batches.sizes = Large(4)
        leases: dict[int, Any] = {}
        for turn in range(300):
            for number, (at, asked, cancel) in enumerate(arrivals):
                if at == turn:
                    leases[number] = bench.run("talk", **asked)
                elif number in leases and cancel == turn:
                    bench.inbox.put(CancelTask(leases[number].claim))
            if bench.loop._jobs or not bench.inbox.empty():
                bench.loop.carry_out(bench.loop.decide())
        assert not bench.loop._jobs
        for number, (_, asked, _) in enumerate(arrivals):
            tokens, end = alone(asked)
            said, how = said_of(bench.sent, leases[number].claim), end_of(bench.sent, leases[number].claim)
            assert (said, how) == (tokens, end) if how != "TaskStopped" else said == tokens[: len(said)]
        assert talk.left == talk.started


def test_next_token_is_computed_while_the_last_one_is_reported(tmp_path: Path) -> None:
    """Given forwards that each end only when the token of before is being told, and tokens whose telling ends only when
    the next forward has begun, then an overlapped loop comes to the end of a text."""
    both, steps, counts = threading.Barrier(2), 6, Counter[str]()

    def wait(what: str) -> None:
        counts[what] += 1
        if what == "compute" and counts[what] > 1 or what == "grown" and counts[what] < steps:
            both.wait(WAIT_S)

    bench = Bench(tmp_path, {"talk": Talk(wait)}, 1, overlapped=True)
    lease = bench.run("talk", tag=3, steps=steps)
    assert isinstance(bench.outcome(lease), TaskCompleted)
    assert said_of(bench.sent, lease.claim) == alone({"tag": 3, "steps": steps})[0]


def test_reporting_thread_selects_the_device_before_its_first_report(tmp_path: Path) -> None:
    selecting, telling = list[str](), list[str]()

    def tell(what: str) -> None:
        if what == "grown":
            telling.append(threading.current_thread().name)

    bench = Bench(tmp_path, talks := {"talk": Talk(tell)}, 1)
    own = bench.store, bench.results, bench.inbox, bench.sent.append
    device = ComputeDevice()
    device.select = lambda: selecting.append(threading.current_thread().name)  # type: ignore[method-assign]
    bench.loop = StepLoop(talks, *own, 1, overlapped=True, device=device)
    bench.outcome(bench.run("talk", tag=3, steps=6))
    here = threading.current_thread().name
    assert selecting == [*{*telling} - {here}] != []


def test_stop_found_while_reporting_discards_one_extra_step(tmp_path: Path) -> None:
    """That is dropped, and a token which ends a text when it is drawn costs none."""
    tokens, _ = alone({"tag": 3, "steps": 8})
    for asked, more in (({"stop": sum(tokens[:4]) % 23}, 1), ({"end": tokens[2]}, 0), ({}, 0)):
        counts = []
        talk = Talk(lambda what, counts=counts: counts.append(what))  # type: ignore[misc]
        bench = Bench(tmp_path, {"talk": talk}, 1, overlapped=True)
        done = bench.outcome(lease := bench.run("talk", tag=3, steps=8, **asked))
        assert isinstance(done, TaskCompleted)
        said, _ = alone({"tag": 3, "steps": 8, **asked})
        assert said_of(bench.sent, lease.claim) == said
        assert counts.count("compute") == len(said) + more
        assert bench.results.read(lease.task.request, 0) == str(said).encode()


def test_overlapped_loops_of_ranks_run_the_same_steps(group: Callable[..., Group]) -> None:
    """Given two ranks, when texts end by what is told of them, one fails, and one is cancelled, then both ranks have
    made the same steps in the same company."""
    made: list[list[list[int]]] = [[], []]

    class Noted(Talk):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

        def step(self, batch: Sequence[Text]) -> list[int | Exception]:
            made[self.rank].append([state.tokens[0] for state in batch])
            return super().step(batch)

    ranks = group(Noted(0), Noted(1), overlapped=True)
    every = [{"tag": tag, "steps": 9, "stop": tag} for tag in range(5)] + [{"tag": 7, "steps": 9, "no_tell": 4}]
    runs = [ranks.begin(**asked) for asked in every]
    for run, asked in zip(runs, every, strict=True):
        ranks.outcome(run)
        assert said_of(ranks.sent[0], run.lease.claim) == alone(asked)[0]
    ranks.until(lambda: len(made[0]) == len(made[1]), "the second rank to be as far")
    assert made[0] == made[1]
