"""Real sizes on a GPU, without network and without downloads: models of random weights, built here from configurations.

    python -m bench.gpu [--kind wan] [--kind flux] [--part PART]... [--folder DIR] [--device cuda:0] [--tiny] [--keep]

`make gpu` runs all of it piece by piece, each in under ten minutes, and what is done already no second time.

Wan 2.1 1.3B and a model of FLUX.1's size, in bfloat16, the VAE in float32. Each is written to DIR (15 and 34 GB, one
after the other, removed again unless --keep), so that everything below loads and runs what a server would. Parts:

stages    loading, seconds of each stage, peak memory of each against all in one process
batching  seconds of a step for 1 to 8 pictures together, guidance halves apart and fused
bytes     whether a picture's latents depend on its mates, as in bench/steps.py
verdicts  the same of every stage, as the probe of exact pools compares it: equal, or the function that is to blame
offload   a whole request with weights resident, and resting in pinned memory (model, sequential)
copies    host to device and back through an arena's memory, as it is, registered with CUDA, and torch's pinned memory
compare   `unfuse compare`: latency, memory and bytes of three processes against one pipeline
many      servers with 16 clients for small pictures of Wan, exact against batched
layouts   the same with all stages in a worker, split, and as `serve` chooses
stream    when a client has a video's first frame, as in bench/stream.py
families  the verdicts of a tiny model of each family, in float32 and bfloat16
products  whether padding, or tiles of a fixed size, make a layer's product the same in every batch, and what they cost

--tiny runs all of it on the CPU with tiny models. JSON goes to standard output, a table to standard error.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, get_args

import msgspec
import torch

from bench import gpu_exact
from bench.gpu_served import Served
from bench.model import Case, Halves, Made, Model
from bench.report import show
from bench.steps import independence
from tools import tiny
from unfuse.arena.arena import Arena
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import UnfuseError
from unfuse.core.offload_options import Offload
from unfuse.planning.machine import inspect_machine
from unfuse.weights.folder import INDEX

MIB, GIB = 1 << 20, 1 << 30
PARTS = ("stages", "batching", "bytes", "verdicts", "offload", "compare")
MANY = ("many", "layouts", "stream")
"""Parts of models that are small enough to be there twice."""

ONCE = ("copies", "families", "products")
"""Parts that are not of a model of real size."""

BATCHES = (1, 2, 4, 8)
RUNS = 3
STEPS = 5
"""Steps that are timed of a batch."""

Build = Callable[[], Any]


@dataclass(frozen=True)
class Subject:
    """A model: the tiny one whose layout it has, the components that take the place of tiny ones, what is asked of it.

    `sides` are those of square pictures, for batching; `request` is (width, height, frames), with `steps`; `gigabytes`
    are what its folder takes. The parameters that --kind's published model has are in `parameters`, in millions.
    """

    kind: str
    halves: tuple[Halves, ...]
    request: tuple[int, int, int]
    steps: int
    sides: tuple[int, ...] = (256, 512, 1024)
    components: dict[str, Build] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    gigabytes: int = 0
    parts: tuple[str, ...] = PARTS


def umt5_xxl() -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    sizes = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    return UMT5EncoderModel(UMT5Config(vocab_size=256384, **sizes))


def wan_1_3b() -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=12,
        attention_head_dim=128,
        in_channels=16,
        out_channels=16,
        text_dim=4096,
        freq_dim=256,
        ffn_dim=8960,
        num_layers=30,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=1024,
    )


def wan_vae() -> Any:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=96, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, temperal_downsample=[False, True, True]
    )


def t5_xxl() -> Any:
    from transformers import T5Config, T5EncoderModel

    sizes = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    return T5EncoderModel(T5Config(vocab_size=32128, feed_forward_proj="gated-gelu", **sizes))


def clip_l() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}  # the tiny tokenizer's
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=49408,
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            max_position_embeddings=77,
            projection_dim=768,
            **ends,
        )
    )


def flux_12b() -> Any:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=64,
        num_layers=19,
        num_single_layers=38,
        attention_head_dim=128,
        num_attention_heads=24,
        joint_attention_dim=4096,
        pooled_projection_dim=768,
        guidance_embeds=True,
        axes_dims_rope=(16, 56, 56),
    )


def flux_vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[128, 256, 512, 512],
        layers_per_block=2,
        latent_channels=16,
        norm_num_groups=32,
        sample_size=1024,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


REAL = (
    Subject(
        "wan",
        ("apart", "fused"),
        (832, 480, 17),
        10,
        components={"text_encoder": umt5_xxl, "transformer": wan_1_3b, "vae": wan_vae},
        parameters={"text_encoder": 5681, "transformer": 1419, "vae": 127},
        gigabytes=15,
        parts=PARTS + MANY,
    ),
    Subject(
        "flux",
        ("apart",),
        (1024, 1024, 1),
        8,
        components={
            "text_encoder": clip_l,
            "text_encoder_2": t5_xxl,
            "transformer": flux_12b,
            "vae": flux_vae,
        },
        parameters={"text_encoder": 123, "text_encoder_2": 4762, "transformer": 11901, "vae": 84},
        gigabytes=34,
    ),
)
"""Sizes as published, by Wan-AI/Wan2.1-T2V-1.3B-Diffusers and black-forest-labs/FLUX.1-dev."""

TINY = (
    Subject("wan", ("apart", "fused"), (48, 32, 5), 6, sides=(32, 64), parts=PARTS + MANY),
    Subject("flux", ("apart",), (32, 32, 1), 6, sides=(32, 64)),
)


def build(subject: Subject, folder: Path, device: str) -> float:
    """The model in a folder, its weights drawn on the device; returns the seconds that took.

    Tokenizers and noise schedulers are the tiny model's.
    """
    began = time.monotonic()
    unfinished = folder.with_suffix(".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    tiny.build(subject.kind, unfinished, serving=not subject.components)
    for name, make in subject.components.items():
        shutil.rmtree(unfinished / name)
        model = created(make, device)
        model.save_pretrained(unfinished / name, max_shard_size="8GB")
        del model
        forget()
    tokenizer = unfinished / "tokenizer" / "tokenizer_config.json"
    if "text_encoder_2" in subject.components:  # CLIP's tokenizer: the tiny one ends after 20 tokens
        tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"model_max_length": 77}))
    unfinished.rename(folder)
    return time.monotonic() - began


def created(make: Build, device: str) -> Any:
    """A component of random weights in bfloat16, on the device; "meta" has no weights."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return make().eval()
    finally:
        torch.set_default_dtype(torch.float32)


def forget() -> None:
    """Give the device the memory back that nothing uses any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def peak(device: str) -> Iterator[dict[str, int]]:
    """Most bytes that torch has on the device meanwhile, and how many of them were there before; 0 on a CPU."""
    found: dict[str, int] = {"before": 0, "peak": 0}
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        found["before"] = torch.cuda.memory_allocated(device)
    yield found
    if device != "cpu":
        torch.cuda.synchronize(device)
        found["peak"] = torch.cuda.max_memory_allocated(device)


class InProcess:
    """A model that is measured in this process: loaded once, whole."""

    def __init__(self, subject: Subject, folder: Path, device: str) -> None:
        self.subject, self.folder, self.device = subject, folder, device
        self.loaded: dict[str, dict[str, float]] = {}
        self.model = self.load()

    def load(self, offload: Offload = "none") -> Model:
        dtype = "auto" if self.device == "cpu" else "bfloat16"
        options = ComputeOptions(device=self.device, dtype=dtype, offload=offload)
        return Model(self.folder, options, self.device, self._hear)

    def _hear(self, component: str, seconds: float, size: int) -> None:
        self.loaded[component] = {"seconds": round(seconds, 2), "mib": round(size / MIB, 1)}

    def case(self, size: tuple[int, int, int], steps: int) -> Case:
        case = Case(self.model, [], size, steps)
        made = [self.model.encode(case.params(seed)) for seed in range(4)]
        return Case(self.model, made, size, steps)

    def stages(self) -> dict[str, Any]:
        """Each stage of the request in turn: seconds, the median of a few runs; memory of its weights and on top."""
        case, made = self.case(self.subject.request, self.subject.steps), Made()
        params, model = case.params(1), self.model
        found: dict[str, Any] = {}
        for name, spec in model.specs.items():
            model.run(name, params, dict(made))
            seconds = []
            with peak(self.device) as memory:
                for _ in range(RUNS):
                    model.synchronize()
                    began = time.perf_counter()
                    model.run(name, params, made)
                    model.synchronize()
                    seconds.append(time.perf_counter() - began)
            weights = sum(self.loaded[component]["mib"] for component in spec.components if component in self.loaded)
            found[name] = {
                "seconds": round(median(seconds), 4),
                "weights_mib": round(weights, 1),
                "on_top_mib": round((memory["peak"] - memory["before"]) / MIB, 1),
            }
        one_step = case.step_seconds(self.subject.halves[0], 1, STEPS)
        needs = [stage["weights_mib"] + stage["on_top_mib"] for stage in found.values()]
        on_top = max(stage["on_top_mib"] for stage in found.values())
        fused = sum(stage["weights_mib"] for stage in found.values()) + on_top
        return {
            "loading": self.loaded,
            "each": found,
            "step_s": round(one_step, 4),
            "largest_process_mib": round(max(needs), 1),
            "one_process_mib": round(fused, 1),
            "largest_over_one": round(max(needs) / fused, 3),
        }

    def batching(self) -> dict[str, Any]:
        """Seconds of a step, and how many times as fast a picture is as with forwards of its own."""
        table: dict[str, Any] = {}
        for side in self.subject.sides:
            case, rows = self.case((side, side, 1), STEPS + 1), {}
            for halves in self.subject.halves:
                for batch in BATCHES:
                    with suppress(torch.OutOfMemoryError):
                        rows[halves, batch] = case.step_seconds(halves, batch, STEPS)
            alone = rows["apart", 1]
            table[f"{side}²"] = {
                f"{batch}, {halves}": {
                    "step_ms": round(s * 1e3, 2),
                    "throughput_over_alone": round(alone * batch / s, 2),
                }
                for (halves, batch), s in rows.items()
            }
        return table

    def bytes(self) -> dict[str, Any]:
        """Of small pictures."""
        side = self.subject.sides[0]
        return independence(self.case((side, side, 1), self.subject.steps), self.subject.halves[-1], trials=3)

    def verdicts(self) -> dict[str, Any]:
        """Of small pictures, and of the request as a pair."""
        width, height, frames = self.subject.request
        side = self.subject.sides[0]
        small = gpu_exact.verdicts(self.model, gpu_exact.SIZES, width=side, height=side, num_frames=1)
        pair = gpu_exact.verdicts(self.model, (2,), width=width, height=height, num_frames=frames)
        return {"small": small, "request": pair}

    def offload(self) -> dict[str, Any]:
        """The whole request, one stage after the other in this process; the first one brings what rests."""
        if self.device == "cpu":
            return {"none": self._request(self.model), "model": "needs a GPU", "sequential": "needs a GPU"}
        found = {"none": self._request(self.model)}
        for how in get_args(Offload)[1:]:
            del self.model
            forget()
            self.model = self.load(how)
            found[how] = self._request(self.model)
        del self.model
        forget()
        self.model = self.load()
        for how in found:
            found[how]["over_resident"] = round(found[how]["seconds"] / found["none"]["seconds"], 2)
        return dict(found)

    def _request(self, model: Model) -> dict[str, float]:
        width, height, frames = self.subject.request
        sizes = {"width": width, "height": height, "num_frames": frames, "num_inference_steps": self.subject.steps}
        seconds = []
        with peak(self.device) as memory:
            for _ in range(RUNS):
                made = Made()
                began = time.perf_counter()
                for name in model.specs:
                    model.run(name, model.params(1, **sizes), made)
                model.synchronize()
                seconds.append(time.perf_counter() - began)
        return {"seconds": round(median(seconds), 3), "peak_mib": round(memory["peak"] / MIB, 1)}


def copies(device: str, capacity: int) -> dict[str, Any]:
    """GiB a second between a device and host memory: an arena's, the same registered with CUDA, torch's own pinned."""
    arena = Arena(capacity)
    lying = torch.from_numpy(arena.memory)
    hosts = {"arena": lying}
    found: dict[str, Any] = {"arena": _copied(lying, device)}
    if device != "cpu":
        runtime = torch.cuda.cudart()
        error = int(runtime.cudaHostRegister(lying.data_ptr(), capacity, 0))
        found["arena, registered"] = f"cudaHostRegister failed: {error}" if error else _copied(lying, device)
        if not error:
            runtime.cudaHostUnregister(lying.data_ptr())
        hosts["pinned"] = torch.empty(capacity, dtype=torch.uint8, pin_memory=True)
        found["torch's pinned memory"] = _copied(hosts["pinned"], device)
    arena.close()
    return found


def _copied(host: torch.Tensor, device: str) -> dict[str, dict[str, float]]:
    found = {}
    for size in (MIB, 16 * MIB, 256 * MIB):
        if size > len(host):
            continue
        here, there = host[:size], torch.zeros(size, dtype=torch.uint8, device=device)
        rates = {"to_device": _rate(there, here), "from_device": _rate(here, there)}
        found[f"{size // MIB} MiB"] = {way: round(rate, 2) for way, rate in rates.items()}
    return found


def _rate(target: torch.Tensor, source: torch.Tensor) -> float:
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        target.copy_(source)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return len(source) / GIB / median(seconds[2:])


def measure(subject: Subject, folder: Path, device: str, parts: tuple[str, ...]) -> dict[str, Any]:
    """Those parts, in this process first; what fails is said in its place, so that the rest is measured too."""
    found: dict[str, Any] = {}
    inside = {part for part in parts if hasattr(InProcess, part)}
    if inside:
        whole = InProcess(subject, folder, device)
        for part in parts:
            if part in inside:
                found[part] = _tried(getattr(whole, part))
        del whole
        forget()
    served = Served(folder, device, subject.request, subject.steps, subject.sides[0])
    for part in parts:
        if hasattr(Served, part):
            found[part] = _tried(getattr(served, part))
    return found


def _tried(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        return work() | {"took_s": round(time.monotonic() - began, 1)}
    except (RuntimeError, UnfuseError) as error:
        return {"failed": f"{type(error).__name__}: {error}", "took_s": round(time.monotonic() - began, 1)}


@contextmanager
def placed(wanted: Path | None, subject: Subject, keep: bool) -> Iterator[Path]:
    """A folder for the model, which goes again unless it is to be kept."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = (wanted or Path(temporary)) / subject.kind
        folder.parent.mkdir(parents=True, exist_ok=True)
        gigabytes = shutil.disk_usage(folder.parent).free / 1e9
        if gigabytes < subject.gigabytes and not (folder / INDEX).exists():
            raise SystemExit(
                f"{folder} has {gigabytes:.0f} GB free, {subject.gigabytes} are needed: give another --folder"
            )
        yield folder
        if not keep:
            shutil.rmtree(folder)


Table = tuple[str, list[str], list[list[object]]]


def given(figures: dict[str, Any], *path: str) -> dict[str, Any]:
    """What there is under these names, without figures that stand alone."""
    for name in path:
        figures = figures.get(name, {})
    return {name: value for name, value in figures.items() if isinstance(value, dict)}


def tables(figures: dict[str, Any]) -> Iterator[Table]:
    """Title, columns and rows of every table."""
    rates = [(memory, size, rate) for memory, sizes in given(figures, "copies").items() for size, rate in sizes.items()]
    yield (
        "Copies, GiB/s",
        ["host memory", "bytes", "to the device", "from it"],
        [[m, s, *r.values()] for m, s, r in rates],
    )
    for model, verdicts in given(figures, "families").items():
        yield f"{model}, tiny: verdicts", ["stage, batch", "verdict"], [[*row] for row in verdicts.items()]
    columns = ["product", "sizes with equal bytes", "over as they come"]
    yield "Products", columns, named(given(figures, "products"))
    for kind in (subject.kind for subject in REAL):
        found = figures.get(kind, {})
        stages = named(given(found, "stages", "each"))
        yield f"{kind}: stages", ["stage", "seconds", "weights, MiB", "on top, MiB"], stages
        for size, batches in given(found, "batching").items():
            columns = ["pictures, halves", "step, ms", "throughput over alone"]
            yield f"{kind}: {size}, pictures in a forward", columns, named(batches)
        company = given(found, "bytes")
        yield f"{kind}: bytes in company", ["batch", *next(iter(company.values()), {})], named(company)
        yield (
            f"{kind}: a request by --offload",
            ["offload", "seconds", "peak, MiB", "over resident"],
            named(given(found, "offload")),
        )
        for which, sizes in given(found, "verdicts").items():
            yield f"{kind}: verdicts, {which}", ["stage, batch", "verdict"], [[*row] for row in sizes.items()]
        for part, column in {"many": "--batching", "layouts": "--workers"}.items():
            yield f"{kind}: 16 clients", [column, "pictures a second"], named(given(found, part))
        columns = ["measure", "diffusers", "unfuse", "ratio"]
        yield f"{kind}: {found.get('compare', {}).get('equal')} equal", columns, named(given(found, "compare"))


def named(rows: dict[str, Any]) -> list[list[object]]:
    return [[name, *row.values()] for name, row in rows.items()]


def readable(cell: object) -> str:
    if isinstance(cell, int) and cell > MIB:
        return f"{cell / MIB:.0f} MiB"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def markdown(figures: dict[str, Any]) -> str:
    """The tables that have rows, for docs/reference/performance/gpu.md."""
    lines: list[str] = []
    for title, columns, rows in tables(figures):
        if rows:
            lines += ["", title, "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
            lines += [f"| {' | '.join(map(readable, row))} |" for row in rows]
    return "\n".join([*lines, ""])


def main() -> None:
    words = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--kind", action="append", choices=[subject.kind for subject in REAL])
    words.add_argument("--part", action="append", choices=(*PARTS, *MANY, *ONCE))
    words.add_argument("--folder", type=Path)
    words.add_argument("--device", default="cuda:0")
    words.add_argument("--tiny", action="store_true")
    words.add_argument("--keep", action="store_true")
    asked = words.parse_args()
    device, parts = "cpu" if asked.tiny else asked.device, tuple(asked.part or (*PARTS, *MANY, *ONCE))
    if device != "cpu" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: use --tiny for a test run on the CPU")
    figures: dict[str, Any] = {}
    if "copies" in parts:
        figures["copies"] = copies(device, 16 * MIB if asked.tiny else 512 * MIB)
    if "families" in parts:
        with tempfile.TemporaryDirectory() as root:
            figures["families"] = gpu_exact.families(Path(root), device)
    if "products" in parts:
        layers = {"64 to 128": (64, 128)} if asked.tiny else gpu_exact.LAYERS
        figures["products"] = gpu_exact.products(device, layers)
    for subject in TINY if asked.tiny else REAL:
        wanted = tuple(part for part in parts if part in subject.parts)
        if not wanted or (asked.kind and subject.kind not in asked.kind):
            continue
        with placed(asked.folder, subject, asked.keep) as folder:
            seconds = 0.0 if (folder / INDEX).exists() else build(subject, folder, device)
            figures[subject.kind] = {"built_s": round(seconds, 1)} | measure(subject, folder, device, wanted)
    show(
        "gpu",
        tiny=asked.tiny,
        device=device,
        on=msgspec.to_builtins(inspect_machine(())),
        torch_cuda=torch.version.cuda,
        **figures,
    )
    sys.stderr.write(markdown(figures))


if __name__ == "__main__":
    main()
