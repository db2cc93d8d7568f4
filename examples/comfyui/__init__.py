"""A ComfyUI node that has an unfuse server make pictures: prompt, size, seed, LoRA in, IMAGE out.

Install: copy or link this folder to ComfyUI/custom_nodes/unfuse, and `pip install` the clone of unfuse that has it
in ComfyUI's environment. A key, if the server wants one, is read from UNFUSE_API_KEY: what is typed into a node is
saved with every picture.
"""

from __future__ import annotations

import os
import queue
import threading
from typing import Any

import comfy.model_management
import comfy.utils
import numpy as np
import torch

from unfuse import connect
from unfuse.client import Client, Request

LOOK_S = 0.2
"""Seconds between two looks whether somebody has pressed Cancel."""

STEPPED = ("denoise", "whole")
"""The stages that take many steps, one for each picture."""


class UnfuseImage:
    """Pictures of a prompt, made by a server."""

    CATEGORY = "unfuse"
    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "make"
    DESCRIPTION = "Has an unfuse server make pictures of a prompt."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, tuple[Any, ...]]]:
        """What the node asks for; 0 steps or guidance, and an empty model, are what the server has as its default."""
        return {
            "required": {
                "server": ("STRING", {"default": os.environ.get("UNFUSE_SERVER", "http://127.0.0.1:8000")}),
                "prompt": ("STRING", {"multiline": True, "default": "a red circle on white"}),
                "width": ("INT", {"default": 0, "min": 0, "max": 8192, "step": 8}),
                "height": ("INT", {"default": 0, "min": 0, "max": 8192, "step": 8}),
                "seed": ("INT", {"default": 0, "min": 0, "max": (1 << 32) - 1, "control_after_generate": True}),
            },
            "optional": {
                "model": ("STRING", {"default": ""}),
                "negative_prompt": ("STRING", {"multiline": True, "default": ""}),
                "steps": ("INT", {"default": 0, "min": 0, "max": 1000}),
                "guidance": ("FLOAT", {"default": 0.0, "min": 0.0, "max": 100.0, "step": 0.1}),
                "count": ("INT", {"default": 1, "min": 1, "max": 10}),
                "lora": ("STRING", {"default": ""}),
                "lora_scale": ("FLOAT", {"default": 1.0, "min": -10.0, "max": 10.0, "step": 0.05}),
            },
        }

    def make(
        self,
        server: str,
        prompt: str,
        width: int,
        height: int,
        seed: int,
        model: str = "",
        negative_prompt: str = "",
        steps: int = 0,
        guidance: float = 0.0,
        count: int = 1,
        lora: str = "",
        lora_scale: float = 1.0,
    ) -> tuple[torch.Tensor]:
        """Ask, show how far it is, and return the pictures as (count, height, width, 3) between 0 and 1.

        Raises what the server refuses, as a sentence, and ComfyUI's own interruption after Cancel, which also cancels
        the request.
        """
        if bool(width) != bool(height):
            raise ValueError("give both width and height, or 0 for both")
        asked: dict[str, Any] = {
            "model": model,
            "size": f"{width}x{height}" if width else "",
            "negative_prompt": negative_prompt,
            "num_inference_steps": steps,
            "guidance_scale": guidance,
            "lora": lora,
        }
        asked = {name: value for name, value in asked.items() if value}
        if lora:
            asked["lora_scale"] = lora_scale
        with connect(server, os.environ.get("UNFUSE_API_KEY")) as client:
            asked.setdefault("model", client.models()[0]["id"])
            request = client.submit(prompt, video=False, seed=seed, n=count, **asked)
            follow(client, request)
            images = request.result().images
        arrays = [np.asarray(image.convert("RGB"), dtype=np.float32) / 255 for image in images]
        return (torch.from_numpy(np.stack(arrays)),)


def follow(client: Client, request: Request) -> None:
    """Show the steps of a request until it is over; cancel it when ComfyUI is told to stop."""
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen() -> None:
        try:
            for event in request.events():
                told.put(event)
        except Exception as error:  # told to who waits, below
            told.put(error)
        told.put(None)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    bar: Any = None
    done: dict[str, int] = {}
    try:
        while True:
            comfy.model_management.throw_exception_if_processing_interrupted()
            try:
                event = told.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            if event is None:
                return
            if isinstance(event, Exception):
                raise event
            if event.type == "progress" and event.stage.startswith(STEPPED):
                total = event.steps * sum(stage["name"].startswith(STEPPED) for stage in request.view["stages"])
                bar = bar or comfy.utils.ProgressBar(total)
                done[event.stage] = event.step
                bar.update_absolute(sum(done.values()))
    except BaseException:
        request.cancel()
        raise
    finally:
        listener.join()


NODE_CLASS_MAPPINGS = {"UnfuseImage": UnfuseImage}
NODE_DISPLAY_NAME_MAPPINGS = {"UnfuseImage": "Picture (unfuse)"}
