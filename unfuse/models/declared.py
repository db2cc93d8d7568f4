"""What diffusers' own source says of a pipeline class, read as text: cards are made in processes without torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from unfuse.core.errors import ConfigError
from unfuse.core.plan import Params, Value
from unfuse.models.defaults import RequestDefaults

IMAGE, VIDEO = "image", "video"


class DeclaredPipeline(msgspec.Struct, frozen=True):
    """A pipeline class: the parameters of its call with their defaults, as far as these are plain values (else None).

    `medium` is what a call returns: pictures or videos, or "" for anything else. `needs` are parameters without any
    default. `loras`: it loads adapters.
    """

    name: str
    takes: dict[str, Value]
    needs: tuple[str, ...]
    medium: str
    loras: bool


@cache
def declared(name: str) -> DeclaredPipeline | None:
    """What diffusers declares of that pipeline class; None if it cannot be called. ConfigError without diffusers."""
    family = [*_family(name)]
    call = _call(family)
    if call is None:
        return None
    defaults = _defaults(call)
    return DeclaredPipeline(
        name,
        {argument: _literal(default) for argument, default in defaults.items()},
        tuple(argument for argument, default in defaults.items() if default is None),
        _medium(call),
        any("LoraLoaderMixin" in ast.unparse(base) for one in family for base in one.bases),
    )


@cache
def call_defaults(file: str, pipeline: str) -> Params:
    """The defaults of a pipeline's call, of those parameters a model may have defaults for.

    `file` is relative to the diffusers package. Raises ConfigError when diffusers has no such class.
    """
    path = _diffusers() / file
    call = _call([found]) if path.is_file() and (found := _class_in(path.read_bytes(), pipeline)) else None
    if call is None:
        raise ConfigError(f"the installed diffusers has no {pipeline} in {file}: install a version that has it")
    given = {name: _literal(default) for name, default in _defaults(call).items()}
    known = RequestDefaults.__struct_fields__
    return {name: value for name, value in reversed(given.items()) if value is not None and name in known}


@cache
def scheduler_classes() -> frozenset[str]:
    """The names of diffusers' noise schedulers."""
    source = "".join(file.read_text() for file in (_diffusers() / "schedulers").rglob("scheduling_*.py"))
    return frozenset(re.findall(r"^class (\w+Scheduler)\(", source, re.MULTILINE))


def has_pipelines(library: str) -> bool:
    """Whether that is a folder of diffusers' pipelines, which may have classes of components too."""
    return library.isidentifier() and (_diffusers() / "pipelines" / library / "__init__.py").is_file()


def _family(name: str) -> Iterator[ast.ClassDef]:
    """A class of the pipelines, then those that it is derived from."""
    if not name.isidentifier():
        return
    for file in sorted((_diffusers() / "pipelines").rglob("*.py")):
        if found := _class_in(file.read_bytes(), name):
            yield found
            for base in found.bases:
                if isinstance(base, ast.Name) and base.id.endswith("Pipeline"):
                    yield from _family(base.id)
            return


def _class_in(source: bytes, name: str) -> ast.ClassDef | None:
    if f"class {name}(".encode() not in source:
        return None
    classes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    return next((node for node in classes if node.name == name), None)


def _call(family: Sequence[ast.ClassDef]) -> ast.FunctionDef | None:
    parts = (part for one in family for part in one.body)
    return next((part for part in parts if isinstance(part, ast.FunctionDef) and part.name == "__call__"), None)


def _defaults(call: ast.FunctionDef) -> dict[str, ast.expr | None]:
    """The arguments of a call, each with its default; None of one that has to be given."""
    arguments = [*call.args.args[1:], *call.args.kwonlyargs]
    given = [*call.args.defaults, *call.args.kw_defaults]
    return dict(zip((one.arg for one in arguments), [None] * (len(arguments) - len(given)) + given, strict=True))


def _diffusers() -> Path:
    spec = find_spec("diffusers")
    if spec is None or spec.origin is None:
        raise ConfigError("diffusers is not installed: pip install diffusers")
    return Path(spec.origin).parent


def _literal(node: ast.expr | None) -> Value:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float) else None


def _medium(call: ast.FunctionDef) -> str:
    """By the names of what it returns; where it hands on what another pipeline returned, by what can be asked for."""
    made = [node.value for node in ast.walk(call) if isinstance(node, ast.Return)]
    outputs = [one for one in made if isinstance(one, ast.Call) and ast.unparse(one.func).endswith("Output")]
    if not outputs:
        return VIDEO if "num_frames" in {one.arg for one in call.args.args} else IMAGE
    named = {key.arg for key in outputs[-1].keywords} | {ast.unparse(outputs[-1].func)}
    if "audio" in named or "audios" in named:
        return ""
    if "frames" in named:
        return VIDEO
    return IMAGE if named & {"images", "image", "ImagePipelineOutput"} else ""


RATES: Mapping[str, int] = {
    "Allegro": 15,
    "AnimateDiff": 8,
    "AnyFlow": 16,
    "ChronoEdit": 16,
    "CogVideoX": 8,
    "ConsisID": 8,
    "Cosmos": 30,
    "Cosmos2VideoToWorld": 16,
    "Cosmos2_5_Predict": 16,
    "EasyAnimate": 8,
    "Helios": 24,
    "Hunyuan": 24,
    "HunyuanVideoFramepack": 30,
    "I2VGenXL": 16,
    "Kandinsky5": 24,
    "Kandinsky6": 24,
    "LTX": 25,
    "Latte": 8,
    "LucyEdit": 24,
    "Mochi": 30,
    "MotifVideo": 24,
    "PIA": 8,
    "SanaImageToVideo": 16,
    "SanaVideo": 16,
    "SanaWM": 16,
    "SkyReelsV2": 24,
    "StableVideoDiffusion": 7,
    "TextToVideo": 8,
    "VideoToVideoSD": 8,
    "Wan": 16,
    "WanAnimate": 30,
}
"""Frames a second by prefix of the pipeline's class name. The longest matching prefix applies.

A rate is that of the pipeline's example in diffusers (`export_to_video(…, fps=…)`). If the example has none, or not
the rate of the training data, it is that of the model's authors: 24 for HunyuanVideo and SkyReels, 30 for Mochi, 8
for AnimateDiff and Latte.
"""

EXPANDED_WAN = 24  # Wan 2.2 5B, which has a timestep for each token (expand_timesteps)
COGVIDEOX_1_5 = 16  # recognized by its temporal patch size


def frame_rate(pipeline: str, index: Mapping[str, Any], transformer: Mapping[str, Any]) -> int | None:
    """Return the frames a second of a model's videos, or None for an unknown class.

    Args:
        pipeline: the class that model_index.json names.
        index: model_index.json.
        transformer: the configuration of the transformer, empty if there is none.
    """
    if pipeline.startswith("Wan") and index.get("expand_timesteps"):
        return EXPANDED_WAN
    if pipeline.startswith("CogVideoX") and transformer.get("patch_size_t"):
        return COGVIDEOX_1_5
    begins = [name for name in RATES if pipeline.startswith(name)]
    return RATES[max(begins, key=len)] if begins else None
