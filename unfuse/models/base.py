"""The family port: everything unfuse knows of one kind of model, in one file."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from unfuse.core.card import ModelCard
from unfuse.core.errors import ConfigError
from unfuse.core.plan import Pipeline, StageSpec
from unfuse.models.folder import ModelFolder
from unfuse.stages.base import Stage

Report = Callable[[str, float, int], None]
"""Hears of each component that is loaded: its name, the seconds it took, the bytes of its files."""

DTYPES = ("float32", "bfloat16", "float16")

_DTYPE_ARGUMENT = {"transformers": "dtype", "diffusers": "torch_dtype"}


class Family(ABC):
    """One kind of model, stateless: the stages it has, what bounds a request, how each stage's components load."""

    @abstractmethod
    def card(self, name: str, folder: Path, dtype: str = "auto") -> ModelCard:
        """What gateway and scheduler know of the model in a folder, served as `name`.

        Must not import torch, nor what imports it: gateway, scheduler and a worker's parent call it. Equal folders and
        dtypes give equal cards, wherever the card is made. Raises ConfigError for what cannot be served.
        """

    @abstractmethod
    def load(
        self, spec: StageSpec, folder: Path, device: str, dtypes: Mapping[str, str], report: Report | None = None
    ) -> Stage:
        """A stage of that model with its weights on the device; no other component's weights are read.

        `dtypes` are the card's, by component. Raises ConfigError, naming the component, when one cannot be loaded.
        """


def weights_ids(folder: ModelFolder, pipeline: Pipeline) -> dict[str, str]:
    """The identity of each component of a pipeline.

    That of a stage's first component, which names the stage's pool, covers the others of the stage too: workers whose
    transformers are equal and whose noise schedulers are not must not share a pool.
    """
    alone = {component: (component,) for stage in pipeline.stages for component in stage.components}
    groups = {**alone, **{stage.components[0]: stage.components for stage in pipeline.stages}}
    return {component: folder.identity(*group) for component, group in groups.items()}


def choose_dtype(wanted: str) -> str:
    """The dtype that `--dtype` means; "auto" is float32, which is what diffusers loads when it is told nothing.

    Raises ConfigError for an unknown one.
    """
    if wanted == "auto":
        return DTYPES[0]
    if wanted not in DTYPES:
        raise ConfigError(f"unknown dtype {wanted!r}: one of auto, {', '.join(DTYPES)}")
    return wanted


class Loader:
    """Loads components of one model onto one device, ready to compute, by class and from their own subfolders."""

    def __init__(self, folder: ModelFolder, device: str, dtypes: Mapping[str, str], report: Report | None) -> None:
        self.folder = folder
        self._device, self._dtypes, self._report = device, dtypes, report

    def model(self, component: str, library: str, name: str) -> Any:
        """A component with weights, all of which must be in its safetensors files."""
        import torch

        began = time.monotonic()
        self.folder.weights(component)
        dtype = getattr(torch, self._dtypes[component])
        options = {_DTYPE_ARGUMENT[library]: dtype, "use_safetensors": True, "output_loading_info": True}
        model, info = self._read(component, library, name, options)
        if missing := sorted(info["missing_keys"]):
            raise ConfigError(
                f"model {self.folder.path}: the weights of component {component} lack {missing[0]} "
                f"({len(missing)} tensors in all): {name} would run on random numbers"
            )
        model = model.to(self._device).eval()
        self._tell(component, began)
        return model

    def plain(self, component: str, library: str, name: str) -> Any:
        """A component without weights, such as a tokenizer or a noise scheduler."""
        began = time.monotonic()
        self.folder.config(component)
        found = self._read(component, library, name, {})
        self._tell(component, began)
        return found

    def _read(self, component: str, library: str, name: str, options: dict[str, Any]) -> Any:
        from safetensors import SafetensorError

        import_module(f"{library}.utils.logging").disable_progress_bar()
        kind = getattr(import_module(library), name)
        path = self.folder.path / component
        try:
            return kind.from_pretrained(str(path), local_files_only=True, **options)
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"component {component} in {path} cannot be loaded as {name}: {reason}") from error

    def _tell(self, component: str, began: float) -> None:
        if self._report is not None:
            self._report(component, time.monotonic() - began, self.folder.size(component))
