"""Whether requests that share a forward of a model of real width keep the bytes that each has alone, and at what cost.

    python -m bench.gpu_widths [--device cuda:0] [--only NAME]... [--products]

Models have real widths, few blocks and random weights, and are built on the device: no network, no files. A JSON line
for each: of batches of 2, 3, 4 and 8 requests, how many requests have the bytes that they have alone, and ms, in a
plain forward and in one by the rule of `unfuse.stages.batch_invariant_ops`.

`--products` compares products of random numbers: of each number of terms, how many differ in some batch, the outputs a
request of the largest that does, and those that the rule would miss.

On a CPU (`--device cpu`) models are narrow, to see that all of it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor
from torch.nn import functional

from unfuse.stages.batch_invariant_ops import depends_on_cuda, one_by_one

SIZES = (2, 3, 4, 8)
RUNS = 3

Forward = Callable[[slice], Tensor]
"""A model's forward for these of its requests."""

TOKENS = (1, 2, 16, 64, 77, 96, 128, 154, 226, 256, 333, 384, 512, 768, 1024, 1560, 2048)
OUTPUTS = (64, 320, 768, 1280, 1536, 2048, 2560, 3072, 3840, 4096, 5120, 6144, 8960, 12288, 15360, 18432)
TERMS = (64, 256, 768, 1280, 1536, 2048, 2560, 3072, 3840, 4096, 5120, 6144, 8960, 10240, 12288, 13824, 15360, 20480)
MOST_OUTPUTS = 12_000_000
"""Of one request; larger products fill a GPU by themselves."""


class Subjects:
    """The models, with the inputs of up to eight requests."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.tiny = device == "cpu"
        self._random = torch.Generator(device).manual_seed(1)

    def built(self, build: Callable[[], Any], dtype: torch.dtype = torch.bfloat16) -> Any:
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            with torch.device(self.device):
                return build().eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(torch.float32)

    def drawn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=self.device, generator=self._random).to(dtype)

    def times(self, requests: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.linspace(999, 15, requests, device=self.device).to(dtype)

    def grid(self, side: int) -> int:
        """Latents a side of a picture."""
        return 8 if self.tiny else side // 8

    def heads(self, real: int) -> int:
        return 2 if self.tiny else real

    def positions(self, tokens: int, axes: int, *requests: int) -> Tensor:
        one = torch.zeros(tokens, axes, device=self.device)
        one[:, 1] = torch.arange(tokens, device=self.device)
        return one.expand(*requests, tokens, axes)

    def flux(self, side: int, dtype: torch.dtype = torch.bfloat16) -> Forward:
        sizes = {"joint_attention_dim": 4096, "pooled_projection_dim": 768, "axes_dims_rope": (16, 56, 56)}
        model = self.built(
            lambda: diffusers.FluxTransformer2DModel(
                num_layers=1, num_single_layers=1, num_attention_heads=self.heads(24), guidance_embeds=True, **sizes
            ),
            dtype,
        )
        tokens = self.grid(side) ** 2 // 4
        latents, text = self.drawn(8, tokens, 64, dtype=dtype), self.drawn(8, 512, 4096, dtype=dtype)
        pooled, times = self.drawn(8, 768, dtype=dtype), self.times(8, dtype) / 1000
        places = {"img_ids": self.positions(tokens, 3), "txt_ids": self.positions(512, 3)}
        return lambda rows: model(
            latents[rows], text[rows], pooled[rows], times[rows], guidance=times[rows], return_dict=False, **places
        )[0]

    def qwen_image(self, side: int) -> Forward:
        model = self.built(
            lambda: diffusers.QwenImageTransformer2DModel(num_layers=2, num_attention_heads=self.heads(24))
        )
        grid = self.grid(side) // 2
        latents, text, times = self.drawn(8, grid**2, 64), self.drawn(8, 100, 3584), self.times(8) / 1000
        mask = torch.ones(8, 100, dtype=torch.long, device=self.device)
        return lambda rows: model(
            latents[rows],
            text[rows],
            mask[rows],
            times[rows],
            img_shapes=[[(1, grid, grid)]] * len(latents[rows]),
            return_dict=False,
        )[0]

    def sd3(self, side: int, medium: bool = False) -> Forward:
        heads = self.heads(24)
        kind = {"qk_norm": "rms_norm", "dual_attention_layers": (0,)} if medium else {}
        model = self.built(
            lambda: diffusers.SD3Transformer2DModel(
                num_layers=2,
                num_attention_heads=heads,
                caption_projection_dim=64 * heads,
                pos_embed_max_size=192,
                **kind,
            )
        )
        grid = self.grid(side)
        latents, text, pooled = self.drawn(8, 16, grid, grid), self.drawn(8, 333, 4096), self.drawn(8, 2048)
        times = self.times(8)
        return lambda rows: model(latents[rows], text[rows], pooled[rows], times[rows], return_dict=False)[0]

    def sdxl(self, side: int) -> Forward:
        wide = {"block_out_channels": (64, 64, 64) if self.tiny else (320, 640, 1280)}
        deep = {"transformer_layers_per_block": 1 if self.tiny else [1, 2, 10], "attention_head_dim": [5, 10, 20]}
        model = self.built(
            lambda: diffusers.UNet2DConditionModel(
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                layers_per_block=2,
                cross_attention_dim=2048,
                use_linear_projection=True,
                addition_embed_type="text_time",
                addition_time_embed_dim=256,
                projection_class_embeddings_input_dim=2816,
                **wide,
                **deep if not self.tiny else {"attention_head_dim": 8},
            )
        )
        grid = self.grid(side)
        latents, text, pooled = self.drawn(8, 4, grid, grid), self.drawn(8, 77, 2048), self.drawn(8, 1280)
        sizes = torch.tensor([[side, side, 0, 0, side, side]] * 8, device=self.device, dtype=torch.bfloat16)
        times = self.times(8)
        return lambda rows: model(
            latents[rows],
            times[rows],
            text[rows],
            return_dict=False,
            added_cond_kwargs={"text_embeds": pooled[rows], "time_ids": sizes[rows]},
        )[0]

    def wan(self, frames: int) -> Forward:
        model = self.built(
            lambda: diffusers.WanTransformer3DModel(
                num_layers=2,
                num_attention_heads=self.heads(12),
                attention_head_dim=128,
                ffn_dim=512 if self.tiny else 8960,
                text_dim=4096,
                cross_attn_norm=True,
                qk_norm="rms_norm_across_heads",
            )
        )
        height, width = (8, 8) if self.tiny else (60, 104)
        latents, text, times = self.drawn(4, 16, frames, height, width), self.drawn(4, 512, 4096), self.times(4)
        return lambda rows: model(latents[rows], times[rows], text[rows], return_dict=False)[0]

    def hunyuan_video(self) -> Forward:
        model = self.built(
            lambda: diffusers.HunyuanVideoTransformer3DModel(
                num_layers=1, num_single_layers=1, num_attention_heads=self.heads(24)
            )
        )
        height, width = (8, 8) if self.tiny else (60, 104)
        latents, text, pooled = self.drawn(4, 16, 2, height, width), self.drawn(4, 256, 4096), self.drawn(4, 768)
        lengths = torch.tensor([40, 17, 99, 256], device=self.device)
        mask = (torch.arange(256, device=self.device) < lengths[:, None]).to(torch.bfloat16)
        guidance, times = torch.full((4,), 6000.0, device=self.device, dtype=torch.bfloat16), self.times(4)
        return lambda rows: model(
            latents[rows], times[rows], text[rows], mask[rows], pooled[rows], guidance[rows], return_dict=False
        )[0]

    def z_image(self, side: int, *lengths: int) -> Forward:
        narrow = {"dim": 256, "n_heads": 2, "n_kv_heads": 2} if self.tiny else {}
        model = self.built(lambda: diffusers.ZImageTransformer2DModel(n_layers=2, n_refiner_layers=1, **narrow))
        grid = self.grid(side)
        latents, texts = [*self.drawn(4, 16, 1, grid, grid)], [self.drawn(length, 2560) for length in lengths]
        times = self.times(4) / 1000
        return lambda rows: torch.stack(model(latents[rows], times[rows], texts[rows], return_dict=False)[0])

    def t5(self, tokens: int) -> Forward:
        width, inner, heads = (64, 128, 2) if self.tiny else (4096, 10240, 64)
        config = transformers.T5Config(
            vocab_size=1000,
            d_model=width,
            d_kv=64,
            d_ff=inner,
            num_layers=4,
            num_heads=heads,
            feed_forward_proj="gated-gelu",
        )
        model = self.built(lambda: transformers.T5EncoderModel(config))
        ids = torch.randint(1000, (8, tokens), device=self.device, generator=self._random)
        return lambda rows: model(ids[rows], return_dict=False)[0]

    def clip(self, width: int, heads: int, layers: int) -> Forward:
        config = transformers.CLIPTextConfig(
            vocab_size=1000,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            projection_dim=width,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
        model = self.built(lambda: transformers.CLIPTextModelWithProjection(config))
        ids = torch.randint(2, 1000, (8, 77), device=self.device, generator=self._random)
        ids[:, 40] = 1
        return lambda rows: model(ids[rows], return_dict=False)[0]

    def all(self) -> dict[str, Callable[[], Forward]]:
        whole = torch.float32
        return {
            "flux, 1 and 1 blocks, 512": lambda: self.flux(512),
            "flux, 1 and 1 blocks, 1024": lambda: self.flux(1024),
            "flux, 1 and 1 blocks, 512, float32": lambda: self.flux(512, whole),
            "qwen-image, 2 blocks, 512": lambda: self.qwen_image(512),
            "sd3, 2 blocks, 1024": lambda: self.sd3(1024),
            "sd3.5 medium, 2 blocks, 1024": lambda: self.sd3(1024, medium=True),
            "sdxl, whole, 1024": lambda: self.sdxl(1024),
            "wan 1.3B, 2 blocks, 832x480, 5 frames": lambda: self.wan(2),
            "hunyuan-video, 1 and 1 blocks, 832x480, 5 frames": self.hunyuan_video,
            "z-image, 2 blocks, 512, texts of one length": lambda: self.z_image(512, 96, 96, 96, 96),
            "t5-xxl, 4 of 24 layers, 128 tokens": lambda: self.t5(128),
            "clip-l": lambda: self.clip(768, 12, 2 if self.tiny else 12),
        }


def compared(forward: Forward) -> dict[str, Any]:
    """Equal requests and ms by batch size, plain and by the rule."""
    requests = len(forward(slice(None)))
    alone = [forward(slice(row, row + 1)) for row in range(requests)]
    found: dict[str, Any] = {"1, ms": timed(lambda: forward(slice(1)))[1]}
    for name, rule in {"plain": lambda size: nullcontext(), "by the rule": one_by_one}.items():
        found[name] = {}
        for size in (size for size in SIZES if size <= requests):
            with rule(size):
                together, ms = timed(lambda size=size: forward(slice(size)))
            equal = sum(torch.equal(together[row : row + 1], alone[row]) for row in range(size))
            found[name] |= {str(size): equal, f"{size}, ms": ms}
    return found


def timed(work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The last result, and the median of a few runs in ms."""
    result, seconds = work(), []
    for _ in range(RUNS):
        synchronize(result)
        began = time.perf_counter()
        result = work()
        synchronize(result)
        seconds.append(time.perf_counter() - began)
    return result, round(median(seconds) * 1e3, 2)


def synchronize(result: Tensor) -> None:
    if result.is_cuda:
        torch.cuda.synchronize(result.device)


def products(subjects: Subjects, dtype: torch.dtype, bias: bool, terms: Sequence[int]) -> Iterator[dict[str, Any]]:
    """By number of terms: how many products differ in some batch, and those of them that the rule would miss."""
    for width in terms:
        inputs = subjects.drawn(max(SIZES), max(TOKENS), width, dtype=dtype)
        weights, biases = subjects.drawn(max(OUTPUTS), width, dtype=dtype), subjects.drawn(max(OUTPUTS), dtype=dtype)
        tried, differing, missed = 0, [], []
        for tokens in TOKENS:
            for outputs in (outputs for outputs in OUTPUTS if outputs * tokens <= MOST_OUTPUTS):
                batch = inputs[:, :tokens].contiguous()
                others = weights[:outputs], biases[:outputs] if bias else None
                tried += 1
                one = functional.linear(batch[:1], *others)
                if all(torch.equal(functional.linear(batch[:size], *others)[:1], one) for size in SIZES):
                    continue
                differing.append(tokens * outputs)
                if not depends_on_cuda(functional.linear, max(SIZES), batch, (batch, *others)):
                    missed.append((tokens, outputs))
        yield {
            "terms": width,
            "tried": tried,
            "differ": len(differing),
            "most_outputs": max(differing, default=0),
            "missed": missed,
        }


@torch.no_grad()
def main() -> None:
    words = argparse.ArgumentParser(
        prog="python -m bench.gpu_widths", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--device", default="cuda:0")
    words.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="measure only models whose name begins with NAME; repeatable",
    )
    words.add_argument("--products", action="store_true")
    asked = words.parse_args()
    subjects = Subjects(asked.device)
    if asked.products:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for bias in (False, True):
                for line in products(subjects, dtype, bias, TERMS[:1] if subjects.tiny else TERMS):
                    print(json.dumps({"products": str(dtype).removeprefix("torch."), "bias": bias} | line), flush=True)
        return
    for name, build in subjects.all().items():
        if not asked.only or name.startswith(tuple(asked.only)):
            print(json.dumps({"what": name, **compared(build())}), flush=True)
            if not subjects.tiny:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
