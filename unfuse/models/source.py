"""Where a model's folder is: packaged with unfuse, on this disk, or in the cache of the hub library."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from unfuse.core.errors import ConfigError
from unfuse.models.folder import PLAIN, ModelFolder, hub_errors, unserved
from unfuse.models.names import PLANS, SUFFIX, hub_name

PACKAGED = {"unfuse/shapes": "shapes"}
"""Models that come with unfuse, and their folders beside this file."""


def resolve_source(name: str, revision: str | None = None, components: Collection[str] | None = None) -> Path:
    """The folder of a model: a packaged one by name, an existing folder, else a hub name, or a known one in short.

    Of a hub name come the configurations of the whole model, and the weights of `components` only (None: of all). It
    is looked up, and downloaded, as the hub library does it: in its cache, with its token, offline when HF_HUB_OFFLINE
    is set. `revision`, or what follows an @, is a branch, tag or commit of it; all files are of one commit.
    Raises ConfigError when there is no such model, and for one that is not served or cannot be brought.
    """
    path = Path(name).expanduser()
    if name and name not in PACKAGED and path.is_dir():
        return path.resolve()
    if path.is_file():
        reason = unserved([path.name]) or "not the folder of a model"
        raise ConfigError(f"model {name!r} is a single file: {reason}")
    name, _, pinned = name.partition("@")
    name = hub_name(name)
    if name in PACKAGED:
        return Path(__file__).parent / PACKAGED[name]
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        short = [one.partition("/")[2].removesuffix(SUFFIX) for one in PLANS.keys() - PACKAGED if "*" not in one]
        known = ", ".join([*PACKAGED, *sorted(short)])
        raise ConfigError(f"model {name!r} is no folder, nor a hub name such as owner/model, nor one of {known}")
    return _from_hub(name, revision or pinned or None, components)


def source_of(folder: Path) -> str:
    """What `resolve_source` finds a folder by: on any machine if it is packaged or a hub's, else on this one."""
    for name, packaged in PACKAGED.items():
        if folder == Path(__file__).parent / packaged:
            return name
    hub = ModelFolder(folder).hub
    return "@".join(hub) if hub else str(folder)


def _from_hub(name: str, revision: str | None, components: Collection[str] | None) -> Path:
    """Configurations come first: they say what is no model, or not served, and which files have the weights."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        plain = [f"*{suffix}" for suffix in PLAIN]
        folder = ModelFolder(Path(snapshot_download(name, revision=revision, allow_patterns=plain)))
        every = folder.components()
        wanted = every if components is None else components
        weights = [f"{folder.at(component)}{file}" for component in wanted for file in folder.weight_names(component)]
        with suppress(LocalEntryNotFoundError):  # said below, by component
            if weights:
                snapshot_download(name, revision=folder.path.name, allow_patterns=weights)
    except hub_errors() as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"model {name!r} is no folder here, is not packaged ({', '.join(PACKAGED)} is), "
            f"and the hub library could not bring it: {reason}"
        ) from error
    for component in wanted:
        folder.weights(component)
    return folder.path
