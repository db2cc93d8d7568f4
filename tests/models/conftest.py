"""Tiny models of random weights, and what undivided diffusers makes of them: once a session, in its own process."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unfuse.core.plan import Params
from unfuse.models import find, resolve_source
from unfuse.stages.base import Stage

SHAPES = str(resolve_source("unfuse/shapes"))


@dataclass(frozen=True)
class Job:
    """One call of an undivided pipeline; `model` is a folder, relative to where the tiny ones are built."""

    name: str
    model: str
    params: dict[str, Any]
    dtype: str = "float32"


def _params(seed: int = 0, prompt: str = "a red circle", **given: Any) -> dict[str, Any]:
    tiny = {"height": 32, "width": 32, "num_frames": 1, "num_inference_steps": 4, "guidance_scale": 5.0}
    return {"prompt": prompt, "negative_prompt": "", **tiny, "max_sequence_length": 24, "seed": seed, **given}


ODD = "  Ünïcode &amp;amp; “quotes”…\u3000ﬁne\u200b ☃️ naÃ¯ve\n\ttabs\x1c "
LONG = "a very long prompt that goes on and on, far behind what the model can read, and then goes on"
WORDS = "a blue star on black"

JOBS = [
    Job("unipc-image", "unipc", _params()),
    Job("unipc-seed", "unipc", _params(2**40 + 7)),
    Job("unipc-prompt", "unipc", _params(prompt="b")),
    Job("unipc-unguided", "unipc", _params(guidance_scale=1.0)),
    Job("unipc-negative", "unipc", _params(3, negative_prompt="blurred, grey", num_inference_steps=7)),
    Job("unipc-one-step", "unipc", _params(4, num_inference_steps=1, height=16, width=48)),
    Job("unipc-video", "unipc", _params(5, ODD, height=48, num_frames=5, num_inference_steps=3)),
    Job("unipc-video-unguided", "unipc", _params(6, num_frames=3, guidance_scale=0.0)),
    Job("unipc-long", "unipc", _params(7, LONG, max_sequence_length=16)),
    Job("unipc-half", "unipc", _params(8, negative_prompt="no"), "bfloat16"),
    Job("euler-image", "euler", _params(9)),
    Job("euler-next-seed", "euler", _params(10)),
    Job("euler-video", "euler", _params(11, ODD, width=48, num_frames=9, negative_prompt="n", guidance_scale=2.5)),
    Job("euler-half", "euler", _params(12, num_frames=3), "bfloat16"),
    Job("shapes-image", SHAPES, _params(1, WORDS, width=64, height=64, max_sequence_length=16, guidance_scale=3.0)),
    Job("shapes-next-seed", SHAPES, _params(2, WORDS, width=64, height=64, max_sequence_length=16, guidance_scale=3.0)),
    Job("shapes-video", SHAPES, _params(13, WORDS, num_frames=5, max_sequence_length=16, negative_prompt="red")),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "job" in metafunc.fixturenames:
        metafunc.parametrize("job", JOBS, ids=[job.name for job in JOBS])


@dataclass(frozen=True)
class Undivided:
    """Where the tiny models are (by `unipc`, `euler`), and the reference results."""

    root: Path

    def folder(self, model: str) -> Path:
        return self.root / model

    def result(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.root / f"{name}.npz", allow_pickle=False) as found:
            return dict(found)


@pytest.fixture(scope="session")
def undivided(tmp_path_factory: pytest.TempPathFactory) -> Undivided:
    root = tmp_path_factory.mktemp("undivided")
    script = Path(__file__).with_name("undivided.py")
    jobs = json.dumps([asdict(job) for job in JOBS])
    command = [sys.executable, "-I", str(script), str(root)]
    done = subprocess.run(command, input=jobs, cwd=root, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return Undivided(root)


@pytest.fixture
def copy(undivided: Undivided, tmp_path: Path) -> Path:
    """A tiny model's folder to break."""
    return Path(shutil.copytree(undivided.folder("unipc"), tmp_path / "model"))


@pytest.fixture(scope="session")
def stages() -> Callable[[Path, str], dict[str, Stage]]:
    """Every stage of a model by name, loaded once a session for each dtype."""
    import torch

    torch.set_num_threads(1)

    @cache
    def load(folder: Path, dtype: str) -> dict[str, Stage]:
        family = find(folder)
        card = family.card("model", folder, dtype)
        return {spec.name: family.load(spec, folder, "cpu", card.dtypes) for spec in card.pipeline.stages}

    return load


@pytest.fixture
def params() -> Callable[..., Params]:
    return lambda *given, **more: {**_params(*given, **more), "output_format": "png"}
