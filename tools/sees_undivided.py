"""Run as a program: what undivided models that see make of chats, given as JSON, in a process of its own.

Usage: python -I sees_undivided.py [THREADS]; each line it reads is a list of cases, and answered by a line. A case has
a folder, messages, files of the pictures, and how many tokens to make, and if it is to be so many, how many at least.
Of a video, it has the files of its frames and how many there are a second.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.modules["unfuse"] = None  # type: ignore[assignment]  # whoever tries to import it here gets an ImportError

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from PIL import Image  # noqa: E402
from transformers.utils import logging  # noqa: E402


def settings(folder: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / name).read_text())
    return found


def patches(folder: str, files: list[str], fps: float) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """Pixels and grid of a video whose frames have a size that fits, written from the papers; and its moments."""
    said = settings(folder, "video_preprocessor_config.json")
    side = said["patch_size"]
    still = settings(folder, "preprocessor_config.json")
    mean, spread = (np.array(still[name], np.float32) for name in ("image_mean", "image_std"))
    frames = [np.asarray(Image.open(file).convert("RGB"), np.float32) / 255 for file in files]
    frames = [(frame - mean) / spread for frame in frames]
    frames += frames[-1:] * (len(frames) % 2)
    rows, columns = frames[0].shape[0] // side, frames[0].shape[1] // side
    made = []
    for group in range(0, len(frames), 2):
        for row in range(0, rows, 2):
            for column in range(0, columns, 2):
                for at in ((row, column), (row, column + 1), (row + 1, column), (row + 1, column + 1)):
                    cut = slice(at[0] * side, (at[0] + 1) * side), slice(at[1] * side, (at[1] + 1) * side)
                    made.append(np.stack([frame[cut] for frame in frames[group : group + 2]]).transpose(3, 0, 1, 2))
    moments = [(first + first + 1) / 2 / fps for first in range(0, len(frames), 2)]
    if len(files) % 2:
        moments[-1] = (len(files) - 1) / fps
    grid = torch.tensor([[len(frames) // 2, rows, columns]])
    return torch.from_numpy(np.stack(made).reshape(len(made), -1)), grid, moments


def inputs(case: dict[str, Any], tokenizer: Any, model: Any) -> dict[str, Any]:
    """What the model's call gets."""
    folder, config = case["folder"], model.config
    text = tokenizer.apply_chat_template(case["messages"], add_generation_prompt=True, tokenize=False)
    given: dict[str, Any] = {}
    if case.get("pictures"):
        processor = transformers.AutoImageProcessor.from_pretrained(folder)
        pictures = processor([Image.open(file) for file in case["pictures"]], return_tensors="pt")
        given |= {"pixel_values": pictures["pixel_values"], "image_grid_thw": pictures["image_grid_thw"]}
        for grid in pictures["image_grid_thw"]:
            text = text.replace("<|image_pad|>", "<one>" * int(grid.prod() // 4), 1)
        text = text.replace("<one>", "<|image_pad|>")
    if case.get("frames"):
        fps = case["fps"]
        pixels, grid, moments = patches(folder, case["frames"], fps)
        each = int(grid[0, 1:].prod() // 4)
        given |= {"pixel_values_videos": pixels, "video_grid_thw": grid}
        if "Qwen3" in type(model).__name__:
            place = "<|vision_start|>" + "<|video_pad|>" * each + "<|vision_end|>"
            whole = "".join(f"<{moment:.1f} seconds>{place}" for moment in moments)
            text = text.replace("<|vision_start|><|video_pad|><|vision_end|>", whole)
        else:
            given["second_per_grid_ts"] = torch.tensor([2 / fps])
            text = text.replace("<|video_pad|>", "<|video_pad|>" * each * int(grid[0, 0]))
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
    given |= {"mm_token_type_ids": kinds} if given else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **given}


@cache
def opened(folder: str) -> tuple[Any, Any]:
    kind = settings(folder, "config.json")["architectures"][0]
    model = getattr(transformers, kind).from_pretrained(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def made_of(case: dict[str, Any]) -> dict[str, Any]:
    model, tokenizer = opened(case["folder"])
    given = inputs(case, tokenizer, model)
    length = {"max_new_tokens": case["most"], "min_new_tokens": case.get("least")}
    told = model.generate(**given, **length, do_sample=False, return_dict_in_generate=True, output_logits=True)
    ids = told.sequences[0, given["input_ids"].shape[1] :].tolist()
    return {
        "prompt": given["input_ids"][0].tolist(),
        "ids": ids,
        "text": tokenizer.decode(ids, skip_special_tokens=True),
        "logits": [step[0].tolist() for step in told.logits],
    }


def main() -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(int(sys.argv[1]) if sys.argv[1:] else 1)
    for line in sys.stdin:
        print(json.dumps([made_of(case) for case in json.loads(line)]), flush=True)


main()
