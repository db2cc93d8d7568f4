"""What a start says: what is served, on what, where, and how to try it."""

from __future__ import annotations

import json
import shlex
from collections import Counter

from unfuse import __version__
from unfuse.arena.limits import readable_bytes
from unfuse.core.card import ModelCard
from unfuse.core.media import IMAGE, UPLOAD, VIDEO
from unfuse.core.words import TEXT
from unfuse.server.gateway import ModelNames
from unfuse.service.plan import Plan

PROMPT = "a red circle on white"


class StartScreen:
    """The lines of a start, for a plan whose models clients know by these `names`. `keyed`: clients need a key."""

    def __init__(self, plan: Plan, names: dict[str, str], *, keyed: bool) -> None:
        self._plan, self._keyed = plan, keyed
        shown = ModelNames(names).shown
        self._served = {shown(model.card.name): model.card for model in plan.models}

    def opening(self) -> list[str]:
        """What is served, and on what."""
        shown = [name if name == card.name else f"{name} ({card.name})" for name, card in self._served.items()]
        return [f"serving {', '.join(shown)} with unfuse {__version__}", *layout_lines(self._plan)]

    def ready(self, url: str, seconds: float) -> list[str]:
        """How long it took until everything was there, and how to try it."""
        took = f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"
        if missing := self._plan.missing_roles():
            return [f"the workers here are ready in {took} s: requests wait until others come ({', '.join(missing)})"]
        return [f"ready in {took} s: open {url}/docs, or try", f"    {self.example(url)}"]

    def example(self, url: str) -> str:
        """A command that makes something with the first model."""
        name, card = next(iter(self._served.items()))
        path, fields, is_form = _first_request(card)
        fields |= {"model": name} if len(self._served) > 1 else {}
        key = " -H 'authorization: Bearer KEY'" if self._keyed else ""
        if is_form:
            sent = " ".join(f"-F {shlex.quote(f'{field}={value}')}" for field, value in fields.items())
        else:
            sent = f"-H 'content-type: application/json' -d {shlex.quote(json.dumps(fields, ensure_ascii=False))}"
        return f"curl {url}{path}{key} {sent}"


def _first_request(card: ModelCard) -> tuple[str, dict[str, object], bool]:
    """The path and fields of a request that the model can answer, and whether they are sent as a form."""
    if TEXT.made_by(card.limits):
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}, False
    needs_picture = card.accepted(UPLOAD).min > 0
    if needs_picture and VIDEO.made_by(card.limits):
        return "/v1/videos", {"prompt": PROMPT, "input_reference": "@FILE"}, True
    if needs_picture:
        return "/v1/images/edits", {"prompt": PROMPT, "image": "@FILE", "response_format": "url"}, True
    if IMAGE.made_by(card.limits):
        return "/v1/images/generations", {"prompt": PROMPT, "response_format": "url"}, False
    return "/v1/videos", {"prompt": PROMPT}, False


def layout_lines(plan: Plan) -> list[str]:
    """Which workers are started where, why so, and the memory that they take."""
    lines = [f"{model.card.name} is not split: {model.card.undivided}" for model in plan.models if model.card.undivided]
    if not plan.workers:
        return [*lines, "no worker is started here: requests wait until one comes (unfuse worker)"]
    if plan.layouts:
        lines.append(plan.layouts.why)
    counts = Counter(f"{worker.role} on {worker.device}" for worker in plan.workers)
    workers = ", ".join(f"{count} × {worker}" for worker, count in counts.items())
    memory = ", ".join(
        f"{sums['device']} {readable_bytes(sums['takes'])} of {readable_bytes(sums['free'])} free"
        for sums in plan.memory()
    )
    return [*lines, f"workers: {workers}; memory: {memory}"]
