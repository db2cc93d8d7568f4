"""A model of another package: three stages of integers, fast, without torch, whose bytes anyone can work out.

It is copied into a package of its own (`cluster.install`), and never imported by a test: `oracle.py` says what its
results have to be, and shares no code with it. Numbers are of 64 bits and wrap.

    encode    embeds[i]  = e0 + i·e1        of the prompt's hash
    denoise   latents[i] = seed·K + i·E     then, at each step t = 1, 2, …: latents = latents·A + embeds + t
    decode    one line of text: size, steps, seed, and sums over the latents

A prompt may hold orders in brackets, `[crash@denoise]`, `[fail=2@vae_decode] [sleep=0.05@denoise]`, for one stage each:
crash (SIGKILL to itself), hang, eat (take memory without end), fail (an error that may pass), refuse (one that will
not), nan (results that are none). With a number, crash, hang, eat and fail happen at so many tries and never again;
sleep takes seconds, at each step.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from unfuse.core.errors import PermanentError, TransientError
from unfuse.core.modalities import OutputSize
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import Params, Pipeline, StageSpec
from unfuse.models.base import Family, Report, RuntimeOptions, weights_ids
from unfuse.stages.base import Checkpoint, EncodedMedia, Stage, StageInput, StageOutput, SteppedStage
from unfuse.stages.specs import DENOISE, TEXT_ENCODE, VAE_DECODE
from unfuse.weights.folder import ModelFolder, choose_dtypes

COMPONENTS = ("text_encoder", "transformer", "vae")
PIXELS_PER_NUMBER = 8
ORDER = re.compile(r"\[(crash|hang|eat|fail|refuse|nan|sleep)(?:=([0-9.]+))?@(\w+)\]")
EAT_PIECE, EAT_AT_MOST = 16 << 20, 1 << 30

A, K, E = 6364136223846793005, 2862933555777941757, 3037000493
_MASK = 2**64 - 1


class Chaos(Family):
    """Its stages are those of a text-to-picture model, so that the usual roles run them."""

    torch = False

    def model_spec(self, name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
        pipeline = Pipeline(
            (
                structs.replace(
                    TEXT_ENCODE,
                    name="encode",
                    components=("text_encoder",),
                    outputs=("embeds",),
                    output_size=OutputSize(256, 1.0),
                ),
                structs.replace(
                    DENOISE, components=("transformer",), inputs=("embeds",), output_size=OutputSize(256, 1.0)
                ),
                structs.replace(VAE_DECODE, name="decode"),
            )
        )
        pipeline.validate()
        model = ModelFolder(folder)
        return ModelSpec(
            name=name,
            source=str(folder),
            family="chaos",
            pipeline=pipeline,
            limits={"size_multiple": 8, "min_size": 8, "max_size": 4096, "max_pixels": 4096 * 4096},
            defaults={"width": 16, "height": 16, "num_inference_steps": 4, "guidance_scale": 1.0},
            weights=weights_ids(model, pipeline, "chaos"),
            dtypes=choose_dtypes(dtype, COMPONENTS),
            created=model.created,
        )

    def load(self, spec: StageSpec, folder: Path, runtime: RuntimeOptions, report: Report | None = None) -> Stage:
        tries = folder / "tries"
        tries.mkdir(exist_ok=True)
        stages: dict[str, type[Encode | Denoise | Decode]] = {
            "text_encode": Encode,
            "denoise": Denoise,
            "vae_decode": Decode,
        }
        if report is not None:
            report(spec.components[0], 0.0, 8)
        return stages[spec.kind](tries)


FAMILY = Chaos()


class Orders:
    """What the prompts want of one stage. Tries are counted in a folder, since whoever crashes forgets."""

    def __init__(self, tries: Path, stage: str) -> None:
        self._tries, self._stage = tries, stage

    def obey(self, params: Params) -> None:
        """Do what the prompt says, if it speaks to this stage."""
        for order, number, stage in ORDER.findall(params["prompt"]):
            if stage == self._stage:
                self._do(order, number, params)

    def wants(self, order: str, params: Params) -> bool:
        return any((found[0], found[2]) == (order, self._stage) for found in ORDER.findall(params["prompt"]))

    def _do(self, order: str, number: str, params: Params) -> None:
        if order == "sleep":
            time.sleep(float(number))
        elif order == "refuse":
            raise PermanentError("the prompt wants to be refused")
        elif order != "nan" and not self._spared(int(number or 0), f"{order}{params['prompt']}{params['seed']}"):
            {"crash": _crash, "hang": _hang, "eat": _eat, "fail": _fail}[order]()

    def _spared(self, times: int, what: str) -> bool:
        """Whether it has happened often enough; counts this time if it has not."""
        name = hashlib.blake2b(f"{self._stage}{what}".encode(), digest_size=16).hexdigest()
        for number in range(times):
            try:
                os.close(os.open(self._tries / f"{name}.{number}", os.O_CREAT | os.O_EXCL))
                return False
            except FileExistsError:
                continue
        return times > 0


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    while True:
        time.sleep(60)


def _eat() -> None:
    """Take memory that is really used; whoever is never stopped says so rather than take all there is."""
    eaten = []
    while len(eaten) * EAT_PIECE < EAT_AT_MOST:
        eaten.append(np.ones(EAT_PIECE, np.uint8))
        time.sleep(0.02)
    raise PermanentError(f"{len(eaten) * EAT_PIECE} bytes were eaten and nobody minded")


def _fail() -> None:
    raise TransientError("the prompt wants to be tried again")


def _count(params: Params) -> int:
    return int(params["width"]) * int(params["height"]) // PIXELS_PER_NUMBER  # type: ignore[arg-type]


def _line(first: int, slope: int, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """first + i·slope for i below count."""
    steps = np.arange(count, dtype=np.uint64)
    return steps * np.uint64(slope & _MASK) + np.uint64(first & _MASK)


def _numbers(tensors: Mapping[str, Any], name: str) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.asarray(tensors[name]).view(np.uint64)


class Encode(Stage):
    """A prompt's hash, drawn out over the size."""

    kind = "text_encode"

    def __init__(self, tries: Path) -> None:
        self._orders = Orders(tries, self.kind)

    def verify(self, task: StageInput) -> None:
        if not isinstance(task.params.get("prompt"), str):
            raise PermanentError("there is no prompt")

    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        return [self._encode(task) for task in batch]

    def _encode(self, task: StageInput) -> StageOutput:
        self._orders.obey(task.params)
        digest = hashlib.blake2b(str(task.params["prompt"]).encode(), digest_size=16).digest()
        first, slope = (int.from_bytes(half, "little") for half in (digest[:8], digest[8:]))
        return StageOutput({"embeds": _line(first, slope, _count(task.params)).view(np.int64)})


@dataclass(frozen=True)
class State:
    """Latents between two steps."""

    params: Params
    embeds: np.ndarray[Any, np.dtype[np.uint64]]
    latents: np.ndarray[Any, np.dtype[np.uint64]]
    step: int = 0


class Denoise(SteppedStage[State]):
    """A few multiplications a step."""

    kind = "denoise"

    def __init__(self, tries: Path) -> None:
        self._orders = Orders(tries, self.kind)

    def verify(self, task: StageInput) -> None:
        if np.asarray(task.tensors["embeds"]).shape != (_count(task.params),):
            raise PermanentError("embeds are of another size than the request")

    def start(self, task: StageInput) -> State:
        seed = int(task.params["seed"])  # type: ignore[arg-type]
        return State(task.params, _numbers(task.tensors, "embeds"), _line(seed * K, E, _count(task.params)))

    def save(self, state: State) -> Checkpoint:
        return Checkpoint({"latents": state.latents.view(np.int64)}, {"step": state.step})

    def resume(self, task: StageInput, checkpoint: Checkpoint) -> State:
        latents = np.array(_numbers(checkpoint.tensors, "latents"))
        return replace(self.start(task), latents=latents, step=int(checkpoint.values["step"]))

    def step(self, batch: Sequence[State]) -> list[State | Exception]:
        return [self._advanced(state) for state in batch]

    def _advanced(self, state: State) -> State | Exception:
        try:
            self._orders.obey(state.params)
        except (PermanentError, TransientError) as error:
            return error
        latents = state.latents * np.uint64(A) + state.embeds + np.uint64(state.step + 1)
        return replace(state, latents=latents, step=state.step + 1)

    def progress(self, state: State) -> tuple[int, int]:
        return state.step, int(state.params["num_inference_steps"])  # type: ignore[arg-type]

    def finish(self, state: State) -> StageOutput:
        scale = np.array([np.nan if self._orders.wants("nan", state.params) else 1.0], np.float32)
        return StageOutput({"latents": state.latents.view(np.int64), "scale": scale})


class Decode(Stage):
    """Sums that no wrong number, and no number in a wrong place, leaves as they were."""

    kind = "vae_decode"

    def __init__(self, tries: Path) -> None:
        self._orders = Orders(tries, self.kind)

    def verify(self, task: StageInput) -> None:
        if np.asarray(task.tensors["latents"]).shape != (_count(task.params),):
            raise PermanentError("latents are of another size than the request")

    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        return [self._decode(task) for task in batch]

    def _decode(self, task: StageInput) -> StageOutput:
        self._orders.obey(task.params)
        if not np.isfinite(np.asarray(task.tensors["scale"])).all():
            raise PermanentError("the latents are not finite")
        params, latents = task.params, _numbers(task.tensors, "latents")
        weighted = latents * np.arange(1, len(latents) + 1, dtype=np.uint64)
        sums = int(latents.sum(dtype=np.uint64)), int(weighted.sum(dtype=np.uint64)), int(latents[-1])
        asked = f"{params['width']}x{params['height']} {params['num_inference_steps']} {params['seed']}"
        text = f"chaos {asked} {sums[0]:016x} {sums[1]:016x} {sums[2]:016x}\n"
        return StageOutput(media=(EncodedMedia("text/plain", text.encode()),))
