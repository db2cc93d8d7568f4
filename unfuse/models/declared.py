"""Declarations of a pipeline class in diffusers' source, which is parsed and not imported.

Importing diffusers imports torch, and model specs are made in processes without torch.
"""

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
    """A pipeline class, as diffusers' source declares it."""

    #: The name of the class.
    name: str
    #: The call's parameters with their defaults. None for a default that is not a number or text, or is missing.
    parameters: dict[str, Value]
    #: The call's parameters without a default.
    required_inputs: tuple[str, ...]
    #: The modality of results: "image" or "video", or "" for anything else.
    modality: str
    #: Whether it can load LoRA adapters.
    loras: bool
    #: The components that stay on the device with CPU offload, because calls use them without their forward.
    not_offloaded: tuple[str, ...] = ()


@cache
def declared_pipeline(name: str) -> DeclaredPipeline | None:
    """Return the declaration of a pipeline class in diffusers' source.

    None if diffusers has no such class, or if neither the class nor its base classes have a `__call__`. Raises
    ConfigError if diffusers is not installed.
    """
    classes = [*_classes_of(name)]
    call = _call(classes)
    if call is None:
        return None

    defaults = _defaults(call)
    return DeclaredPipeline(
        name,
        {argument: _literal(default) for argument, default in defaults.items()},
        tuple(argument for argument, default in defaults.items() if default is None),
        _medium(call),
        any("LoraLoaderMixin" in ast.unparse(base) for node in classes for base in node.bases),
        tuple(name for node in classes for name in _strings(node, "_exclude_from_cpu_offload")),
    )


@cache
def call_defaults(file: str, pipeline: str) -> Params:
    """Return the defaults of a pipeline's call, for parameters of `RequestDefaults`.

    `file` is relative to the diffusers package. Parameters without a default that is a number or text are left out.
    Raises ConfigError if diffusers does not have the class.
    """
    path = _diffusers() / file
    call = _call([node]) if path.is_file() and (node := _class_in(path.read_bytes(), pipeline)) else None
    if call is None:
        raise ConfigError(f"the installed diffusers has no {pipeline} in {file}: install a version that has it")
    defaults = {name: _literal(default) for name, default in _defaults(call).items()}
    known = RequestDefaults.__struct_fields__
    return {name: value for name, value in reversed(defaults.items()) if value is not None and name in known}


@cache
def scheduler_classes() -> frozenset[str]:
    """Return the class names of diffusers' noise schedulers."""
    source = "".join(file.read_text() for file in (_diffusers() / "schedulers").rglob("scheduling_*.py"))
    return frozenset(re.findall(r"^class (\w+Scheduler)\(", source, re.MULTILINE))


def has_pipelines(library: str) -> bool:
    """Return whether `diffusers/pipelines` has a folder of this name.

    The folder may define classes of components, too, so model_index.json may name it as a component's library.
    """
    return library.isidentifier() and (_diffusers() / "pipelines" / library / "__init__.py").is_file()


def _classes_of(name: str) -> Iterator[ast.ClassDef]:
    """Yield a pipeline class, then the pipeline classes from which it is derived."""
    if not name.isidentifier():
        return
    for file in sorted((_diffusers() / "pipelines").rglob("*.py")):
        if node := _class_in(file.read_bytes(), name):
            yield node
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id.endswith("Pipeline"):
                    yield from _classes_of(base.id)
            return


def _class_in(source: bytes, name: str) -> ast.ClassDef | None:
    """Return the class of this name in a module's source, or None."""
    if f"class {name}(".encode() not in source:  # parsing hundreds of files would take seconds
        return None
    classes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    return next((node for node in classes if node.name == name), None)


def _strings(node: ast.ClassDef, attribute: str) -> Iterator[str]:
    """Yield the texts of a list that is an attribute of this class."""
    for member in node.body:
        if isinstance(member, ast.Assign) and ast.unparse(member.targets[0]) == attribute:
            yield from (str(entry) for entry in ast.literal_eval(member.value))


def _call(classes: Sequence[ast.ClassDef]) -> ast.FunctionDef | None:
    """Return the first `__call__` in these classes, or None."""
    members = (member for node in classes for member in node.body)
    return next((node for node in members if isinstance(node, ast.FunctionDef) and node.name == "__call__"), None)


def _defaults(call: ast.FunctionDef) -> dict[str, ast.expr | None]:
    """Return the arguments of a call with their defaults; None for a required one."""
    arguments = [*call.args.args[1:], *call.args.kwonlyargs]
    defaults = [*call.args.defaults, *call.args.kw_defaults]
    required = [None] * (len(arguments) - len(defaults))
    return dict(zip((argument.arg for argument in arguments), required + defaults, strict=True))


def _diffusers() -> Path:
    """Return the folder of the diffusers package. Raises ConfigError without diffusers."""
    spec = find_spec("diffusers")
    if spec is None or spec.origin is None:
        raise ConfigError("diffusers is not installed: pip install diffusers")
    return Path(spec.origin).parent


def _literal(node: ast.expr | None) -> Value:
    """Return the value of a number or text; None for other expressions."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float) else None


def _medium(call: ast.FunctionDef) -> str:
    """Return the modality of a call's results: IMAGE, VIDEO, or "" for anything else.

    It follows from the names in the call's `return` statements. If the call returns another pipeline's result, it
    follows from the call's parameters. Videos with sound are "".
    """
    returned = [node.value for node in ast.walk(call) if isinstance(node, ast.Return)]
    outputs = [node for node in returned if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Output")]
    if not outputs:
        return VIDEO if "num_frames" in {argument.arg for argument in call.args.args} else IMAGE

    names = {keyword.arg for keyword in outputs[-1].keywords} | {ast.unparse(outputs[-1].func)}
    if "audio" in names or "audios" in names:
        return ""
    if "frames" in names:
        return VIDEO
    return IMAGE if names & {"images", "image", "ImagePipelineOutput"} else ""


#: Frames per second by prefix of the pipeline's class name. The longest matching prefix applies.
#: A rate is that of the pipeline's example in diffusers (`export_to_video(…, fps=…)`). If the example has none, or not
#: the rate of the training data, it is that of the model's authors: 24 for HunyuanVideo and SkyReels, 30 for Mochi, 8
#: for AnimateDiff and Latte.
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

#: Wan 2.2 5B, which has a timestep for each token (expand_timesteps).
EXPANDED_WAN = 24

#: CogVideoX 1.5, recognized by its temporal patch size.
COGVIDEOX_1_5 = 16


def frame_rate(pipeline: str, index: Mapping[str, Any], transformer: Mapping[str, Any]) -> int | None:
    """Return the frames per second of a model's videos, or None for an unknown class.

    `pipeline`: the class in model_index.json.
    `index`: model_index.json.
    `transformer`: the transformer's configuration, empty if there is none.
    """
    if pipeline.startswith("Wan") and index.get("expand_timesteps"):
        return EXPANDED_WAN
    if pipeline.startswith("CogVideoX") and transformer.get("patch_size_t"):
        return COGVIDEOX_1_5
    prefixes = [name for name in RATES if pipeline.startswith(name)]
    return RATES[max(prefixes, key=len)] if prefixes else None
