"""What diffusers' own source says of a pipeline class, read as text: cards are made in processes without torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import msgspec

from unfuse.core.errors import ConfigError
from unfuse.core.plan import Value

IMAGE, VIDEO = "image", "video"

CALL = "__call__"


class Declared(msgspec.Struct, frozen=True):
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
def declared(name: str) -> Declared | None:
    """What diffusers declares of that pipeline class; None if it cannot be called. ConfigError without diffusers."""
    family = [*_family(name)]
    call = next(
        (part for one in family for part in one.body if isinstance(part, ast.FunctionDef) if part.name == CALL), None
    )
    if call is None:
        return None
    arguments = [*call.args.args[1:], *call.args.kwonlyargs]
    given = [*call.args.defaults, *call.args.kw_defaults]
    lacking = len(arguments) - len(given)
    defaults = dict(zip((one.arg for one in arguments[lacking:]), given, strict=True))
    return Declared(
        name,
        {one.arg: _literal(defaults.get(one.arg)) for one in arguments},
        tuple(one.arg for one in arguments if defaults.get(one.arg) is None),
        _medium(call),
        any("LoraLoaderMixin" in ast.unparse(base) for one in family for base in one.bases),
    )


def has_pipelines(library: str) -> bool:
    """Whether that is a folder of diffusers' pipelines, which may have classes of components too."""
    return library.isidentifier() and (_pipelines() / library / "__init__.py").is_file()


def _family(name: str) -> Iterator[ast.ClassDef]:
    """A class of the pipelines, then those that it is derived from."""
    if not name.isidentifier():
        return
    mark = f"class {name}(".encode()
    for file in sorted(_pipelines().rglob("*.py")):
        if mark in (source := file.read_bytes()):
            found = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef) and n.name == name)
            yield found
            for base in found.bases:
                if isinstance(base, ast.Name) and base.id.endswith("Pipeline"):
                    yield from _family(base.id)
            return


def _pipelines() -> Path:
    spec = find_spec("diffusers")
    if spec is None or spec.origin is None:
        raise ConfigError("diffusers is not installed: pip install diffusers")
    return Path(spec.origin).parent / "pipelines"


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
