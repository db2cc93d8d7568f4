"""Models of which some components come from elsewhere: one name for both, and a folder of links to both."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from unfuse.core.errors import ConfigError, UsageError
from unfuse.core.paths import expanded
from unfuse.weights.fingerprints import FINGERPRINTS
from unfuse.weights.folder import CONFIG, INDEX, ModelFolder

BEHIND = re.compile(r"#(?=\w+=.)")
"""What stands before each component in the name of a composed model: MODEL#text_encoder=SOURCE#vae=SOURCE."""

FOLDER, ORIGIN = "composed", ".source"
"""The folder with composed models, and the ending of the file beside each that has its name."""

MUST_AGREE = (
    "_class_name",
    "model_type",
    "d_model",
    "hidden_size",
    "latent_channels",
    "in_channels",
    "out_channels",
    "z_dim",
)
"""Settings of a component that the rest of its model relies on."""


def with_components(model: str, sources: Mapping[str, str]) -> str:
    """The name of a model whose components come from these sources."""
    return "".join((model, *(f"#{component}={source}" for component, source in sorted(sources.items()))))


def split_name(name: str) -> tuple[str, dict[str, str]]:
    """The model and the sources of its components, of what `with_components` made; none of any other name."""
    with suppress(OSError, ValueError):  # a name may be too long for a path, or hold a NUL
        if expanded(name).exists():
            return name, {}
    model, *parts = BEHIND.split(name)
    return model, dict(part.split("=", 1) for part in parts)


def parse_component_sources(entries: tuple[str, ...]) -> dict[str, str]:
    """Sources by component, of `--component-source NAME=PATH`. Raises UsageError."""
    found: dict[str, str] = {}
    for entry in entries:
        component, _, source = entry.partition("=")
        if not component.isidentifier() or not source or "#" in source:
            raise UsageError(f"--component-source {entry!r} is not COMPONENT=FOLDER or COMPONENT=HUB_NAME")
        if component in found:
            raise UsageError(f"--component-source names {component} twice")
        path = expanded(source)
        found[component] = str(path.absolute()) if path.exists() else source
    return found


def component_folder(component: str, source: str, found: Path) -> Path:
    """The folder of a component in a source: of that name in a pipeline's, else the source itself."""
    if (found / INDEX).exists():
        if component not in ModelFolder(found).components():
            raise ConfigError(f"--component-source {component}={source}: that model has no component {component}")
        return found / component
    if found.is_dir() and (found / CONFIG).is_file():
        return found
    raise ConfigError(f"--component-source {component}={source}: there is neither {INDEX} nor {CONFIG} in it")


def compose(name: str, model: Path, components: Mapping[str, Path]) -> Path:
    """A folder like that of a model, with other folders for these components. It holds links, and is made once.

    Raises ConfigError for a component that the model does not have, or that does not fit.
    """
    if not (model / INDEX).exists():
        raise ConfigError(f"--component-source is for pipelines, and {model} has no {INDEX}")
    known = ModelFolder(model).components()
    for component, folder in components.items():
        if component not in known:
            raise ConfigError(
                f"--component-source {component}: the model has no such component; components are {', '.join(known)}"
            )
        _check_fits(component, model / component, folder)
    links = {entry.name: entry for entry in model.iterdir() if entry.name not in components} | dict(components)
    said = "\0".join(f"{entry}\0{target.absolute()}" for entry, target in sorted(links.items()))
    place = _place() / sha256(f"{name}\0{said}".encode()).hexdigest()[:24]
    if not place.exists():
        _link(place, name, links)
    return place


def name_of(folder: Path) -> str:
    """The name by which a composed folder was made; "" of any other folder."""
    if folder.parent != _place():
        return ""
    with suppress(OSError):
        return folder.with_suffix(ORIGIN).read_text()
    return ""


def _place() -> Path:
    """Where composed folders are: in the data folder, or the user's cache where there is none."""
    return (FINGERPRINTS.folder or Path.home() / ".cache" / "unfuse").absolute() / FOLDER


def _link(place: Path, name: str, links: Mapping[str, Path]) -> None:
    draft = place.with_name(f"{place.name}.{secrets.token_hex(4)}")
    try:
        draft.mkdir(parents=True, mode=0o700)
        for entry, target in links.items():
            (draft / entry).symlink_to(target.absolute(), target_is_directory=target.is_dir())
        written = draft.with_suffix(f"{draft.suffix}{ORIGIN}")
        written.write_text(name)
        os.replace(written, place.with_suffix(ORIGIN))
        with suppress(OSError):  # another process was faster: its folder has the same links
            draft.rename(place)
    except OSError as error:
        reason = f"{error.strerror}: make room, or choose another data folder"
        raise ConfigError(f"{place} cannot be made ({reason})") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _check_fits(component: str, own: Path, other: Path) -> None:
    """Raise ConfigError where two configurations of a component differ in what the rest of the model relies on."""
    before, after = _config(own), _config(other)
    for key in MUST_AGREE:
        if key in before and key in after and before[key] != after[key]:
            differ = f"its {key} is {after[key]!r}, and the model needs {before[key]!r}"
            raise ConfigError(f"--component-source {component}={other}: {differ}")


def _config(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads((folder / CONFIG).read_bytes())
        return found if isinstance(found, dict) else {}
    return {}
