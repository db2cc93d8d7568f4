"""Where a model's folder is: packaged with unfuse, on this disk, or in the cache of the hub library."""

from __future__ import annotations

from pathlib import Path

from unfuse.core.errors import ConfigError
from unfuse.models.folder import INDEX

PACKAGED = {"unfuse/shapes": "shapes"}
"""Models that come with unfuse, and their folders beside this file."""

FILES = ["*.safetensors", "*.json", "*.txt", "*.model"]
"""What is downloaded: nothing that could be code or a pickle."""


def resolve_source(name: str, revision: str | None = None) -> Path:
    """The folder of a model: a packaged one by name, an existing folder, else a hub name.

    A hub name is looked up, and downloaded, as the hub library does it: in its cache, with its token, offline when
    HF_HUB_OFFLINE is set. `revision` is a branch, tag or commit of it. Raises ConfigError when there is no such model.
    """
    if name in PACKAGED:
        return Path(__file__).parent / PACKAGED[name]
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path.resolve()
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        known = ", ".join(PACKAGED)
        raise ConfigError(f"model {name!r} is no folder, nor a hub name such as owner/model, nor one of {known}")
    return _from_hub(name, revision)


def _from_hub(name: str, revision: str | None) -> Path:
    """The index is fetched before the rest, so that what is not a model costs no long download."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        hf_hub_download(name, INDEX, revision=revision)
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model {name!r} is no folder here, is not packaged ({', '.join(PACKAGED)} is), "
            f"and the hub library could not bring it: {reason}"
        ) from error
