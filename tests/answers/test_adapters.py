"""Adapters (LoRA) of other tools: everything that a file holds takes effect, or its request is a 400 that names it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.pictures import digest, undivided
from tools.server import Server
from tools.tiny import SERVING

KINDS = ("sd", "z-image", "wan", "flux")
"""Models of one server: one undivided, and three that other tools name otherwise."""

Tensors = dict[str, torch.Tensor]
Folder = Callable[[str], Path]


def random(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [0.5 * torch.randn(shape, generator=generator) for shape in shapes]


def pair(path: str, width: int, height: int | None = None, *, down: str = "lora_A", up: str = "lora_B") -> Tensors:
    """A pair of rank 2 for a layer of that width."""
    first, second = random(len(path), (2, width), (height or width, 2))
    return {f"{path}.{down}.weight": first, f"{path}.{up}.weight": second}


def kohya(path: str, width: int, height: int | None = None, alpha: float = 1.0) -> Tensors:
    names = {"down": "lora_down", "up": "lora_up"}
    return {**pair(path, width, height, **names), f"{path}.alpha": torch.tensor(alpha)}


def width_of(folder: Path, part: str, layer: str) -> tuple[int, ...]:
    (file,) = (folder / part).glob("*.safetensors")
    return tuple(load_file(file)[f"{layer}.weight"].shape)


SD = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
SD_LAYER = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
Z = "layers.0.attention.to_q"
Z_KOHYA = "lora_unet_layers_0_attention_to_q"
WAN = "diffusion_model.blocks.0"
PATCH, TIME = "diffusion_model.patch_embedding.diff", "diffusion_model.time_projection.1.diff_b"


def files(folder: Folder) -> Mapping[str, tuple[str, Tensors, str]]:
    """Adapters by name: the kind of the model, the tensors, and what a refusal says ("" of one that is applied)."""
    sd = width_of(folder("sd"), "unet", SD_LAYER)[0]
    z = width_of(folder("z-image"), "transformer", Z)[0]
    wan = width_of(folder("wan"), "transformer", "blocks.0.attn1.to_q")[0]
    whole = {**pair(f"{WAN}.self_attn.q", wan), **pair(f"{WAN}.self_attn.k", wan)}
    ones = torch.ones(wan)
    unet = f"unet.{SD_LAYER}"
    key = unet.replace("to_q", "to_k")
    halves = pair(key, sd)
    dora = torch.ones(sd, 1)
    nan = pair("transformer.blocks.0.attn1.to_q", wan)
    nan["transformer.blocks.0.attn1.to_q.lora_B.weight"][0, 0] = float("nan")
    return {
        "sd-dora": ("sd", {**kohya(SD, sd), f"{SD}.dora_scale": dora}, f"{SD}.dora_scale"),
        "sd-a": ("sd", {**pair(unet, sd), f"{key}.lora_A.weight": halves[f"{key}.lora_A.weight"]}, f"{key}.lora_A"),
        "sd-b": ("sd", {**pair(unet, sd), f"{key}.lora_B.weight": halves[f"{key}.lora_B.weight"]}, f"{key}.lora_B"),
        "sd-loha": ("sd", {**kohya(SD, sd), f"{SD}.hada_w1_a": dora}, f"{SD}.hada_w1_a (LoHa)"),
        "sd-partial-dora": (
            "sd",
            {**pair(unet, sd), **pair(key, sd), f"{unet}.lora_magnitude_vector": torch.ones(sd)},
            f"lacks {key}.lora_magnitude_vector",
        ),
        "sd-wide": ("sd", kohya(SD, sd + 8), "made for another model"),
        "z-dora": (
            "z-image",
            {**pair(f"diffusion_model.{Z}", z), f"diffusion_model.{Z}.dora_scale": torch.ones(z)},
            f"{Z}.dora_scale",
        ),
        "z-kohya-dora": (
            "z-image",
            {**kohya(Z_KOHYA, z), f"{Z_KOHYA}.dora_scale": torch.ones(z)},
            f"{Z_KOHYA}.dora_scale",
        ),
        "wan-diff": ("wan", {**whole, f"{WAN}.norm3.diff": ones, f"{WAN}.norm3.diff_b": ones}, f"{WAN}.norm3.diff "),
        "wan-norm-q": ("wan", {**whole, f"{WAN}.self_attn.norm_q.diff": ones}, f"{WAN}.self_attn.norm_q.diff "),
        "wan-m": ("wan", {**whole, f"{WAN}.diff_m": torch.ones(1, 6, wan)}, f"{WAN}.diff_m"),
        "wan-patch": ("wan", {**whole, PATCH: torch.ones(wan, 4, 1, 2, 2)}, PATCH),
        "wan-time": ("wan", {**whole, TIME: torch.ones(6 * wan)}, TIME),
        "wan-nan": ("wan", nan, "NaN in transformer.blocks.0.attn1.to_q.lora_B.weight"),
        "wan-half": ("wan", {f"{WAN}.self_attn.q.lora_A.weight": ones[None]}, f"{WAN}.self_attn.q.lora_A.weight"),
        "wan-int": ("wan", {one: tensor.to(torch.int8) for one, tensor in whole.items()}, "as integers (I8)"),
        "wan-zeros": ("wan", {**whole, f"{WAN}.norm3.diff": 0 * ones, f"{WAN}.norm3.diff_b": 0 * ones}, ""),
        "wan-biases": ("wan", {**whole, **{f"{WAN}.self_attn.{one}.diff_b": ones * (one == "q") for one in "qk"}}, ""),
        "wan-bias": ("wan", {**whole, f"{WAN}.self_attn.q.diff_b": ones}, ""),
        "wan-older": ("wan", pair("transformer.blocks.0.attn1.to_q", wan, down="lora.down", up="lora.up"), ""),
        "wan-processor": (
            "wan",
            pair("transformer.blocks.0.attn1.processor", wan, down="to_q_lora.down", up="to_q_lora.up"),
            "",
        ),
        "flux-wide": ("flux", kohya("lora_unet_single_blocks_1_linear1", 32, 99), "another model"),
        "flux-comfy": (
            "flux",
            pair("diffusion_model.single_blocks.1.linear1", 32, 99, down="lora_down", up="lora_up"),
            "another model",
        ),
    }


ROWS = {
    "P07": ["sd-dora"],
    "P13": ["sd-a"],
    "P14": ["sd-b"],
    "P05": ["z-dora", "z-kohya-dora"],
    "P08": ["wan-diff", "wan-norm-q", "wan-m", "wan-patch", "wan-time"],
    "P29": ["flux-wide", "flux-comfy"],
    "P47": ["wan-nan", "wan-half"],
    "K2": ["sd-loha", "wan-int"],
    "K4": ["sd-partial-dora"],
    "K11": ["sd-wide"],
}
CASES = [pytest.param(name, marks=pytest.mark.row(row)) for row, names in ROWS.items() for name in names]


@pytest.fixture(scope="module")
def adapters(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("loras")
    for name, (_, tensors, _) in files(folder).items():
        save_file({key: tensor.clone() for key, tensor in tensors.items()}, place / f"{name}.safetensors")
    return place


@pytest.fixture(scope="module")
def server(served: Callable[..., Server], folder: Folder, adapters: Path) -> Server:
    return served(*map(folder, KINDS), "--loras", adapters, "--workers", "all=1")


def picture(server: Server, folder: Folder, kind: str, **asked: Any) -> str:
    """The digest of the pixels that a server makes of a fixed prompt and seed."""
    asked = {"model": str(folder(kind)), "seed": 5, "num_inference_steps": 4, "size": "32x32", **asked}
    reply = server.post("/v1/images/generations", {"prompt": "a cat", **asked})
    return digest(base64.b64decode(reply["data"][0]["b64_json"]))


@pytest.mark.parametrize("name", CASES)
def test_unusable_lora_file_returns_400_with_the_reason(name: str, server: Server, folder: Folder) -> None:
    kind, _, says = files(folder)[name]
    with pytest.raises(HTTPError) as refused:
        picture(server, folder, kind, lora=name)
    told = refused.value.read().decode()
    assert refused.value.code == 400, told
    assert says in told


@pytest.mark.row("P40", "K15", "K2")
def test_lora_images_match_the_undivided_diffusers_pipeline(
    server: Server, folder: Folder, adapters: Path, tmp_path: Path
) -> None:
    """Given files by diffusers' older names, one whose differences are zero, and one with a bias for each layer, when
    they are asked for, then pictures are those of diffusers with the same pairs. One with a bias for some layers is as
    if the others were zero."""
    names = ["wan-older", "wan-processor", "wan-zeros", "wan-biases"]
    standard = {"prompt": "a cat", "seed": 5, "num_frames": 1, **SERVING}
    cases = [{**standard, "loras": [[str(adapters / f"{name}.safetensors"), 1.0]]} for name in names]
    plain, *expected = [frames[0] for frames in undivided(folder("wan"), tmp_path, [standard, *cases])]

    made = [picture(server, folder, "wan", lora=name) for name in names]
    assert made == expected
    assert picture(server, folder, "wan", lora="wan-bias") == made[-1]
    assert picture(server, folder, "wan") == plain not in made
    assert len({*made}) == len(names)


@pytest.mark.nightly
@pytest.mark.row("P04", "P40")
def test_other_families_load_old_lora_key_names_and_reject_dora(
    served: Callable[..., Server], folder: Folder, tmp_path: Path
) -> None:
    kinds = ("sdxl", "sd3", "z-image", "flux")
    place = tmp_path / "loras"
    place.mkdir()
    (weights,) = (folder("sdxl") / "unet").glob("*.safetensors")
    block = next(key.removesuffix(".weight") for key in load_file(weights) if key.endswith("attn1.to_q.weight"))
    layers = dict.fromkeys(("sd3", "flux"), "transformer_blocks.0.attn.to_q") | {"z-image": Z, "sdxl": block}
    for kind in kinds:
        part = "unet" if kind == "sdxl" else "transformer"
        width = width_of(folder(kind), part, layers[kind])[0]
        own = pair(f"{part}.{layers[kind]}", width, down="lora.down", up="lora.up")
        save_file(own, place / f"{kind}.safetensors")
        if kind == "sdxl":
            named = f"lora_unet_{block.replace('.', '_')}"
            dora = {**kohya(named, width), f"{named}.dora_scale": torch.ones(width)}
            save_file(dora, place / "dora.safetensors")
    server = served(*map(folder, kinds), "--loras", place, "--workers", "all=1")

    for kind in kinds:
        case = {"prompt": "a cat", "seed": 5, **SERVING, "loras": [[str(place / f"{kind}.safetensors"), 1.0]]}
        if kind == "sdxl":
            case.pop("max_sequence_length")
        ((expected,),) = undivided(folder(kind), tmp_path, [case])
        assert picture(server, folder, kind, lora=kind) == expected, kind
    with pytest.raises(HTTPError) as refused:
        picture(server, folder, "sdxl", lora="dora")
    assert f"{named}.dora_scale (DoRA)" in refused.value.read().decode()
