"""A family of another package, without torch: three stages over text, which does what the prompt says."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import asdict, replace

from unfuse.core.errors import TransientError, UnsupportedRequest
from unfuse.core.modalities import MediaLimits, OutputSize
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import Pipeline, StageSpec
from unfuse.models.base import Family, Report, RuntimeOptions, weights_ids
from unfuse.stages.base import EncodedMedia, Stage, StageInput, StageOutput, SteppedStage, need
from unfuse.stages.specs import DENOISE, TEXT_ENCODE, VAE_DECODE
from unfuse.weights.folder import ModelFolder

STEP_S = 0.02


def no_torch() -> None:
    if "torch" in sys.modules:
        raise ImportError("torch is in the process of a family that does without")


ERRORS: dict[str, Callable[[], Exception]] = {
    "fail": lambda: TransientError("it was asked to fail"),
    "raise": lambda: LookupError("/srv/models/secret/weights.bin is not as expected"),
    "refuse": lambda: UnsupportedRequest("this adapter is for another model: choose one for this model"),
    "fault": lambda: RuntimeError("CUDA error: an illegal memory access was encountered"),
    "lose": lambda: FileNotFoundError(2, "No such file or directory", "/srv/models/secret/weights.bin"),
}
"""Errors by the word that asks for them."""


def fail_if_broken(place: str) -> None:
    """Raise a device error if the device of this worker is broken there: while it computes ("run") or loads ("load").

    It is broken where the file with the worker's process id says, in the folder OUTSIDE_BROKEN.
    """
    worker = Path("/proc/self/comm").read_text().split()[-1]
    file = Path(os.environ.get("OUTSIDE_BROKEN", "/nowhere"), worker)
    if file.is_file() and place in file.read_text():
        raise RuntimeError(f"CUDA error: an illegal memory access was encountered\nFor debugging, see {place}")


def suffer(prompt: str) -> None:
    """Do as the prompt says, once."""
    fail_if_broken("run")
    match prompt.partition(" ")[0]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "abort":
            print("the last words of a stage", file=sys.stderr, flush=True)
            os.abort()
        case "hang":
            time.sleep(3600)
        case "eat":
            eaten = []
            while True:
                eaten.append(np.ones(1 << 21))  # 16 MiB that are really there
                time.sleep(0.01)
        case word if word in ERRORS:
            raise ERRORS[word]()


class Encode(Stage):
    kind = "text_encode"

    def verify(self, task: StageInput) -> None:
        no_torch()

    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        outputs = []
        for task in batch:
            prompt = need(task.params, "prompt", str)
            suffer(prompt)
            outputs.append(StageOutput({"text": np.frombuffer(prompt.encode(), np.uint8)}))
        return outputs


class Turn(SteppedStage[tuple[StageInput, int]]):
    """Steps of 20 ms; suffers in its second when the prompt says so after "later"."""

    kind = "denoise"

    def verify(self, task: StageInput) -> None:
        assert task.tensors or "later" in need(task.params, "prompt", str)

    def start(self, task: StageInput) -> tuple[StageInput, int]:
        return task, len(task.recorded)

    def step(self, batch: Sequence[tuple[StageInput, int]]) -> list[tuple[StageInput, int] | Exception]:
        time.sleep(STEP_S)
        fail_if_broken("run")
        for task, step in batch:
            first, _, rest = need(task.params, "prompt", str).partition(" ")
            if first == "later" and step:
                suffer(rest)
        return [(task, step + 1) for task, step in batch]

    def warm_up(self) -> None:
        if named := os.environ.get("OUTSIDE_WARMED"):
            with Path(named).open("a") as file:
                file.write("warm\n")

    def progress(self, state: tuple[StageInput, int]) -> tuple[int, int]:
        return state[1], need(state[0].params, "num_inference_steps", int)

    def new_chunks(self, state: tuple[StageInput, int]) -> Sequence[bytes]:
        """Of one that is to speak, the number of the step, who made it, and behind how many pieces it began."""
        speaks = need(state[0].params, "prompt", str).startswith("speak")
        return [b"%d %d %d" % (state[1], os.getpid(), len(state[0].recorded))] if speaks else []

    def finish(self, state: tuple[StageInput, int]) -> StageOutput:
        text = state[0].tensors.get("text")
        assert text is None or isinstance(text, np.ndarray)
        return StageOutput({"turned": np.zeros(1, np.uint8) if text is None else text[::-1]})


class Write(Stage):
    kind = "vae_decode"

    def verify(self, task: StageInput) -> None:
        assert isinstance(task.tensors["turned"], np.ndarray)

    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        turned = [task.tensors["turned"] for task in batch]
        return [StageOutput(media=(EncodedMedia("image/png", bytes(text)),)) for text in turned if text is not None]


PIPELINE = Pipeline(
    (
        replace(
            TEXT_ENCODE,
            components=("tokenizer",),
            outputs=("text",),
            output_size=OutputSize(65536),
            depends_on_params=("prompt",),
        ),
        replace(
            DENOISE, components=("tokenizer_2",), inputs=("text",), outputs=("turned",), output_size=OutputSize(65536)
        ),
        replace(VAE_DECODE, components=("tokenizer_3",), inputs=("turned",)),
    )
)


class Outside(Family):
    torch = False

    def model_spec(self, name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
        weights = weights_ids(ModelFolder(folder), PIPELINE, "outside")
        defaults = {
            "width": 64,
            "height": 64,
            "num_frames": 1,
            "num_inference_steps": 3,
            "guidance_scale": 1.0,
            "output_format": "png",
        }
        dtypes = dict.fromkeys(weights, "float32")
        return ModelSpec(name, str(folder), "outside", PIPELINE, asdict(MediaLimits()), defaults, weights, dtypes)

    def load(self, spec: StageSpec, folder: Path, runtime: RuntimeOptions, report: Report | None = None) -> Stage:
        no_torch()
        fail_if_broken("load")
        return {"text_encode": Encode, "denoise": Turn, "vae_decode": Write}[spec.kind]()


FAMILY = Outside()
