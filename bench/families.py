"""How far what ranks make is from what one makes: by family, kind and dtype, for the processor that this runs on.

A tiny model of each family (random weights, real classes; the built-in one too) denoises a request of a length that
eight divides and one that it does not, on one rank and spread, loaded as `serve` loads them. A cell is "=" if all
latents are equal bit for bit, else the largest difference over the largest number: in float32, then in bfloat16.
`encoder` is the same of what encoders make. `python -m bench.families [--families A,B] [--spreads A,B]`
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.report import show, table
from tools.tiny import build
from unfuse.core.compute_options import ComputeOptions, ParallelDegrees
from unfuse.models import find, read_model_spec, resolve_source

SHAPES = "unfuse/shapes"
FAMILIES = (
    SHAPES,
    "wan",
    "wan-image",
    "wan-2.2",
    "wan-2.2-5b",
    "flux",
    "hunyuan-video",
    "qwen-image",
    "klein",
    "krea",
    "sdxl",
    "sd3",
    "z-image",
    "ltx",
    "kontext",
)
SPREADS = "ulysses:2", "ring:2", "tensor:2", "cfg:2", "layers:2", "shard:2"
ENCODER = "tensor:2"
RANKS = 2
LIMIT_S = 300.0
REQUEST = {
    "prompt": "a red circle",
    "negative_prompt": "blue",
    "true_cfg_scale": 3.0,
    "max_sequence_length": 24,
    "seed": 5,
    "num_inference_steps": 4,
    "num_frames": 1,
    "output_format": "png",
}
SIZES = (128, 128), (160, 224)


def rank(number: int, meet: str, root: Path, families: list[str], spreads: list[str]) -> None:
    """Be one of the ranks; the first one prints, by family, spread and dtype, how far it is."""
    import torch

    from unfuse.parallel.group import Group

    torch.set_num_threads(1)
    group = Group(number, RANKS, meet, "cpu", LIMIT_S)
    for family in families:
        for dtype in ("float32", "bfloat16"):
            model = Tiny(root / family if family != SHAPES else resolve_source(SHAPES), dtype, group)
            for spread, off in model.distances(spreads):
                if number == 0:
                    print(json.dumps([family, spread, dtype, off]), flush=True)
    group.close()


class Tiny:
    """A model, on one rank and on all."""

    def __init__(self, folder: Path, dtype: str, group: Any) -> None:
        self._folder, self._group, self._family = folder, group, find(folder)
        self.card = read_model_spec("tiny", folder, dtype)

    def distances(self, spreads: list[str]) -> list[tuple[str, float]]:
        """How far each spread is from one rank."""
        encoders = [spec for spec in self.card.pipeline.stages if "encode" in spec.name]
        (denoise,) = (spec for spec in self.card.pipeline.stages if spec.name == "denoise")
        asked = [{**self.card.defaults, **REQUEST, "width": width, "height": height} for width, height in SIZES]
        encoded = [self._encoded(encoders, params, "") for params in asked]
        alone = [self._made(denoise, "", params, given) for params, given in zip(asked, encoded, strict=True)]
        found = []
        for spread in spreads:
            if not ParallelDegrees.parse(spread).refusal(denoise.parallelism):
                made = [
                    self._made(denoise, spread, params, given) for params, given in zip(asked, encoded, strict=True)
                ]
                found.append((spread, max(map(distance, alone, made))))
        if not any(ParallelDegrees.parse(ENCODER).refusal(spec.parallelism) for spec in encoders):
            cut = [self._encoded(encoders, params, ENCODER) for params in asked]
            found.append(("encoder", max(map(distance, encoded, cut))))
        return found

    def _encoded(self, encoders: list[Any], params: dict[str, Any], spread: str) -> dict[str, Any]:
        return {name: one for spec in encoders for name, one in self._made(spec, spread, params, {}).items()}

    def _made(self, spec: Any, spread: str, params: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        from unfuse.models.base import RuntimeOptions
        from unfuse.stages.base import StageInput

        mesh = self._group.mesh(ParallelDegrees.parse(spread)) if spread else None
        runtime = RuntimeOptions(
            "cpu", self.card.dtypes, ComputeOptions(), mesh=mesh, group=self._group if spread else None
        )
        stage: Any = self._family.load(spec, self._folder, runtime)
        task = StageInput(params, given, {"image": picture()} if "image" in spec.reads else {})
        stage.verify(task)
        with self._group.together():
            (made,) = stage.run([task])
        return dict(made.tensors)


def picture() -> bytes:
    """A file of one."""
    from PIL import Image

    Image.linear_gradient("L").convert("RGB").save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The largest difference between tensors of one name, over the largest number of it."""
    import torch

    pairs = [(one[name].double(), other[name].double()) for name in one if one[name] is not None]
    return max(0.0 if torch.equal(a, b) else float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--families", default=",".join(FAMILIES))
    options.add_argument("--spreads", default=",".join(SPREADS))
    options.add_argument("--rank", type=int)
    options.add_argument("--root", default="")
    given = options.parse_args()
    families, spreads = given.families.split(","), given.spreads.split(",")
    if given.rank is None:
        tell(families, spreads)
    else:
        rank(given.rank, f"{given.root}/meet", Path(given.root), families, spreads)


def tell(families: list[str], spreads: list[str]) -> None:
    """Start the ranks, and print what they find."""
    with tempfile.TemporaryDirectory() as root:
        for kind in families:
            if kind != SHAPES:
                build(kind, Path(root, kind))
        command = [sys.executable, "-m", "bench.families", *sys.argv[1:], "--root", root, "--rank"]
        ranks = [subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE) for number in range(RANKS)]
        said, *_ = [process.communicate()[0] for process in ranks]
        if any(process.returncode for process in ranks):
            raise SystemExit("a rank failed")
    found = [json.loads(line) for line in said.splitlines()]
    show("families", found=found)
    rows: dict[str, dict[str, object]] = {family: {} for family in families}
    for family, spread, _, off in found:
        cell = "=" if off == 0 else f"{off:.0e}"
        rows[family][spread] = f"{rows[family][spread]}, {cell}" if spread in rows[family] else cell
    table("", rows)


if __name__ == "__main__":
    main()
