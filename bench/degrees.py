"""Whether more ranks pay on this machine: a step of one rank and of several, measured; of other degrees, predicted.

A model is served with one rank and with those that are asked for. It says what a step computes and what it waits in
each, and when more ranks are slower. `python -m bench.degrees [MODEL] [--parallel ROLE=KIND:N] [--threads N]`
"""

from __future__ import annotations

import argparse
import io
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import Any

import msgspec

from bench.report import show, table
from unfuse.client import Client
from unfuse.core.compute_options import ParallelDegrees, parse_parallel
from unfuse.core.modalities import LAST_FRAME, UPLOAD
from unfuse.core.model_spec import ModelSpec
from unfuse.service.logs import Logs
from unfuse.service.options import plan_service, serve_options
from unfuse.service.plan import host_resources
from unfuse.service.service import private_pools
from unfuse.service.settings import load

STEPS, ROUNDS = 4, 3  # the steps of a request that is measured, and how many requests are, behind one that warms up
MOST_DEGREE = 8  # the largest degree that is predicted

SENT: Mapping[str, Callable[[int], float]] = {
    "cfg": lambda degree: degree - 1,
    "tensor": lambda degree: (degree - 1) / degree,
    "tiles": lambda degree: (degree - 1) / degree,
    "ring": lambda degree: (degree - 1) / degree,
    "ulysses": lambda degree: (degree - 1) / degree**2,
}
"""What leaves a rank in a step, by degree, in shares of something that all degrees have in common; of kinds by which
ranks share work."""


class Step(msgspec.Struct, frozen=True):
    """Seconds in which the first rank computed a step, and waited; `least_s`: where least is to be exchanged."""

    compute_s: float
    exchange_s: float = 0.0
    least_s: float = 0.0

    @property
    def whole_s(self) -> float:
        """Both."""
        return self.compute_s + self.exchange_s


class Found(msgspec.Struct, frozen=True):
    """A step of the stages of a role, spread so; "" is one rank."""

    role: str
    spread: str
    ranks: int
    step: Step
    measured: bool


def measure(model: str, parallel: str, threads: int) -> list[Found]:
    """Steps of the roles that `parallel` names: of one rank and so spread, measured; of other degrees, predicted.

    The model is served once with one rank and once so spread. On a CPU all ranks together have as many threads as the
    one has. Raises ConfigError for what cannot be served.
    """
    flags = {"serve.models": [model], "compute.parallel": parallel, "compute.threads": threads}
    loaded, logs = load(flags), Logs()
    logs.open_log()
    planned = plan_service(serve_options(loaded))
    card, cores, spreads = planned.models[0].spec, host_resources(loaded.settings).cores, parse_parallel(parallel)
    most = min(MOST_DEGREE, cores) if all(worker.on_cpu for worker in planned.workers) else MOST_DEGREE

    def served(parallel: str, ranks: int) -> AbstractContextManager[Client]:
        changed = {"compute.parallel": parallel, "compute.threads": threads or max(1, cores // ranks)}
        return private_pools(load({**flags, **changed, "serve.workers": "split"}), logs)

    with served("", 1) as client:
        alone = {role: _measured(client, role, card) for role in spreads}
    found = list[Found]()
    with served(parallel, max(spread.size for spread in spreads.values())) as client:
        for role, spread in spreads.items():
            least = _measured(client, role, card, least=True)
            step = msgspec.structs.replace(_measured(client, role, card), least_s=least.exchange_s)
            found += [Found(role, "", 1, alone[role], True), Found(role, str(spread), spread.size, step, True)]
            found += predicted(found[-1], alone[role], spread, card, most)
    return found


def predicted(measured: Found, alone: Step, spread: ParallelDegrees, card: ModelSpec, most: int) -> Iterator[Found]:
    """The other degrees, where it is spread by one kind: each rank computes its part as efficiently as was measured.
    Of its exchanges what the smallest picture takes grows with the number of others, the rest with what leaves a rank.
    """
    if len(spread.degrees) != 1 or not spread.degrees.keys() <= SENT.keys():
        return
    ((kind, degree),) = spread.degrees.items()
    able = [stage.parallelism for stage in card.pipeline.stages if stage.role == measured.role]
    lost = measured.step.compute_s * degree / alone.compute_s
    for other in range(2, most + 1):
        if (
            other != degree
            and other & (other - 1) == 0
            and not any(ParallelDegrees({kind: other}).refusal(a) for a in able)
        ):
            sent, peers = SENT[kind](other) / SENT[kind](degree), (other - 1) / (degree - 1)
            exchange_s = (measured.step.exchange_s - measured.step.least_s) * sent + measured.step.least_s * peers
            step = Step(alone.compute_s / other * lost, exchange_s)
            yield Found(measured.role, f"{kind}:{other}", other, step, False)


def rows_of(found: Sequence[Found]) -> list[dict[str, Any]]:
    """As they are shown, by role and number of ranks."""
    alone = {one.role: one.step for one in found if not one.spread}
    return [
        {
            "role": one.role,
            "spread": one.spread or "one rank",
            "step_s": round(one.step.whole_s, 4),
            "compute_s": round(one.step.compute_s, 4),
            "exchange_s": round(one.step.exchange_s, 4),
            "gain": round(alone[one.role].whole_s / one.step.whole_s, 2),
            "how": "measured" if one.measured else "predicted",
        }
        for one in sorted(found, key=lambda one: (one.role, one.ranks))
    ]


def advised(found: Sequence[Found]) -> Iterator[str]:
    """What to do, a sentence a role."""
    for role in dict.fromkeys(one.role for one in found):
        own = sorted((one for one in found if one.role == role), key=lambda one: one.ranks)
        best = min(own, key=lambda one: one.step.whole_s)
        slower = [one for one in own if one.ranks > best.ranks]
        more = f"; more ranks are slower ({', '.join(one.spread for one in slower)})" if slower else ""
        what = f"--parallel {role}={best.spread} has the shortest step" if best.spread else "one rank is fastest"
        yield f"{role}: {what}{more}"


def _measured(client: Client, role: str, card: ModelSpec, least: bool = False) -> Step:
    """The median step of a request, over all stages of the role; of the smallest one, if that is asked for."""
    names = {stage.name for stage in card.pipeline.stages if stage.role == role}
    ask, found = _chat if "max_tokens" in card.limits else _pictures, []
    for seed in range(ROUNDS + 1):
        view = ask(client, card, least, {"seed": seed, "cache": False})
        own = [stage for stage in view["stages"] if stage["name"].partition(".")[0] in names]
        found.append(
            (
                sum((one["run_s"] - one["exchange_s"]) / one["steps"] for one in own),
                sum(one["exchange_s"] / one["steps"] for one in own),
            )
        )
    return Step(*(median(seconds) for seconds in zip(*found[1:], strict=True)))


def _pictures(client: Client, card: ModelSpec, least: bool, more: dict[str, Any]) -> Mapping[str, Any]:
    given: dict[str, Any] = {"prompt": "a red circle on white", "num_inference_steps": STEPS, **more}
    given |= {"image": _picture()} if card.accepted_input(UPLOAD).min else {}
    given |= {"last_frame": _picture()} if card.accepted_input(LAST_FRAME).min else {}
    side = card.limits["min_size"]
    return client.generate(**given, **({"size": f"{side}x{side}"} if least else {})).view


def _chat(client: Client, card: ModelSpec, least: bool, more: dict[str, Any]) -> Mapping[str, Any]:
    """Of as many tokens as there are steps; a prompt has some hundred, of which there may be little room for."""
    words = "a red circle on white " * (1 if least else max(1, min(50, int(card.limits["max_tokens"]) // 100)))
    shown = f"data:image/png;base64,{b64encode(_picture()).decode()}"
    parts: list[dict[str, Any]] = [{"type": "text", "text": words}]
    parts += [{"type": "image_url", "image_url": {"url": shown}}] if card.vision else []
    asked = {"messages": [{"role": "user", "content": parts}], "max_tokens": STEPS, **more}
    return client.request(client.post("/v1/chat/completions", asked, {"prefer": "respond-async"})["id"]).result().view


def _picture() -> bytes:
    """A file of one, for models that start from a picture, or see it."""
    from PIL import Image

    Image.new("RGB", (64, 64), "red").save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("model", nargs="?", default="unfuse/shapes")
    flags.add_argument("--parallel", default="denoiser=ulysses:2")
    flags.add_argument("--threads", type=int, default=0)
    given = flags.parse_args(arguments)
    found = measure(given.model, given.parallel, given.threads)
    show("degrees", model=given.model, rows=rows_of(found), advice=[*advised(found)])
    table("role, spread", {f"{row['role']}, {row['spread']}": row for row in rows_of(found)})


if __name__ == "__main__":
    main()
