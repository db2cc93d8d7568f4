"""In Python processes that start with this folder on the path: VAEs run out of memory above TIGHT latents a side."""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "unfuse.stages.vae_memory"


class Tightening(Loader):
    """Loads the module that knows the VAEs, and limits each that it gets."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        modes: Any = module.VaeModes
        create = modes.__init__

        def create_tight(self: Any, vae: Any, *args: Any, **kwargs: Any) -> None:
            create(self, vae, *args, **kwargs)
            if vae is not None:
                vae.decoder.register_forward_pre_hook(check)

        modes.__init__ = create_tight


def check(module: Any, args: tuple[Any, ...]) -> None:
    """Raise for a tile that is too large."""
    import torch

    if max(args[0].shape[-2:]) > int(os.environ["TIGHT"]):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Finder(MetaPathFinder):
    """Finds that one module, and leaves all others to Python."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != NAME:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None:
            spec.loader = Tightening(spec.loader)
        return spec


sys.meta_path.insert(0, Finder())
