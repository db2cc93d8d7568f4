"""The ComfyUI node, by ComfyUI's interface, with a real server of the built-in model. ComfyUI itself is not here."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.pictures import SHAPES
from tools.server import Server, serving, until
from tools.tiny import adapter
from unfuse.client import connect
from unfuse.core.errors import InvalidParameter, TransientError

NODE = Path(__file__).parents[2] / "examples" / "comfyui" / "__init__.py"


class Interrupted(BaseException):
    """What ComfyUI raises in a node after Cancel."""


class Comfy:
    """The parts of ComfyUI that the node uses, and what it has been told."""

    def __init__(self) -> None:
        self.shown: list[tuple[int, int]] = []
        self.cancelled = threading.Event()

    def throw_exception_if_processing_interrupted(self) -> None:
        if self.cancelled.is_set():
            raise Interrupted

    def bar(self, total: int) -> Any:
        return SimpleNamespace(update_absolute=lambda value: self.shown.append((value, total)))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        comfy, management, utils = (ModuleType(name) for name in ("comfy", "comfy.model_management", "comfy.utils"))
        management.throw_exception_if_processing_interrupted = self.throw_exception_if_processing_interrupted  # type: ignore[attr-defined]
        utils.ProgressBar = self.bar  # type: ignore[attr-defined]
        comfy.model_management, comfy.utils = management, utils  # type: ignore[attr-defined]
        for module in (comfy, management, utils):
            monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def comfy(monkeypatch: pytest.MonkeyPatch) -> Comfy:
    made = Comfy()
    made.install(monkeypatch)
    return made


@pytest.fixture
def node(comfy: Comfy) -> Any:
    """The node as ComfyUI makes it: by the mappings of the folder's module."""
    spec = importlib.util.spec_from_file_location("custom_nodes_unfuse", NODE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.NODE_DISPLAY_NAME_MAPPINGS.keys() == module.NODE_CLASS_MAPPINGS.keys()
    return module.NODE_CLASS_MAPPINGS["UnfuseImage"]()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    loras = tmp_path_factory.mktemp("loras")
    adapter(SHAPES, loras, "plain", 1)
    arguments = ("--loras", str(loras), "--workers", "all=1", "--arena", "64MiB")
    with serving(tmp_path_factory.mktemp("serve"), *arguments) as server:
        yield server.ready()


def run(node: Any, server: Server, **inputs: Any) -> torch.Tensor:
    """What ComfyUI does: the defaults of what is not connected, and a call of FUNCTION by name."""
    kinds = node.INPUT_TYPES()
    given = {name: options["default"] for part in kinds.values() for name, (_, options) in part.items()}
    assert inputs.keys() <= given.keys()
    (image,) = getattr(node, node.FUNCTION)(**{**given, "server": server.url, **inputs})
    assert node.RETURN_TYPES == ("IMAGE",)
    assert isinstance(image, torch.Tensor)
    return image


def test_node_returns_the_images_of_the_server_and_shows_progress(node: Any, comfy: Comfy, server: Server) -> None:
    image = run(node, server, prompt="a red circle on white", width=64, height=64, seed=3, count=2, steps=4)
    assert (image.shape, image.dtype) == ((2, 64, 64, 3), torch.float32)
    with connect(server.url) as client:
        same = client.generate("a red circle on white", size="64x64", seed=3, n=2, num_inference_steps=4)
    pixels = [np.asarray(one.convert("RGB")) for one in same.images]
    assert np.array_equal((image.numpy() * 255).round().astype(np.uint8), np.stack(pixels))
    values = [value for value, _ in comfy.shown]
    assert values == sorted(values), comfy.shown
    assert comfy.shown[-1] == (8, 8)


def test_lora_changes_the_image_and_an_unknown_lora_is_rejected(node: Any, server: Server) -> None:
    plain, adapted = (run(node, server, seed=1, steps=4, lora=lora, lora_scale=0.8) for lora in ("", "plain"))
    assert plain.shape == adapted.shape and not torch.equal(plain, adapted)
    with pytest.raises(InvalidParameter, match="lora"):
        run(node, server, lora="nobody")


def test_cancel_cancels_the_request_at_its_next_step(node: Any, comfy: Comfy, server: Server) -> None:
    def cancel_later() -> None:
        until(lambda: comfy.shown, "a step")
        comfy.cancelled.set()

    threading.Thread(target=cancel_later).start()
    with pytest.raises(Interrupted):
        run(node, server, steps=100, count=4)
    (latest, *_) = server.get("/v1/requests?limit=1")["data"]
    assert latest["status"] == "cancelled"


def test_invalid_inputs_and_an_unreachable_server_raise_errors(
    node: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="both width and height"):
        run(node, server, width=64)
    with pytest.raises(InvalidParameter):
        run(node, server, width=8, height=8)
    with pytest.raises(TransientError, match="is `unfuse serve` running there"):
        node.make("http://127.0.0.1:9", "a ring", 0, 0, 1)
