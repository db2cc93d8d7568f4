"""Measurements of one process on a GPU: the parts of `make gpu`. No network, no downloads.

    python -m bench.gpu [--device cuda:0] [--folder DIR] [--tiny] PART [SUBJECT]

Models have real width, few blocks and random weights (`bench/gpu_models.py`). They are built in DIR at first use and
stay there. Each fact is a JSON line. Parts of a subject, flux or wan:

steps     seconds of a denoising step by batch size, until it is launched and until it is done, and memory
vae       seconds and memory of a VAE decode: float32, bfloat16, channels_last, cudnn.benchmark
offload   a request with weights on the GPU, and with --offload model and sequential: seconds, GPU and pinned memory
stages    seconds and memory of each stage of a request
rates     pictures a second of a server with 16 clients: --batching exact and batched
layouts   the same with --workers all=1, split and auto
stream    when a client has the first frame of a video
compare   `unfuse compare`: latency, memory and bytes of a server against the pipeline of diffusers

Other parts:

facts     versions, flags, memory of a CUDA context, pinned memory, classes of device errors, copies
served    `serve` with all stages in one worker (whole) or a worker each (split): equal bytes of a request that runs
          alone, beside seven others, and whose compute process is killed
text      tokens and KV of a tiny Llama against the CPU
decode    milliseconds for a token of 1, 16 and 64 texts of a Llama of width 4096
verdicts  whether tiny models of each family keep the bytes of requests that share a forward
products  whether products of layers do, as they are, padded, one by one, and in tiles (bfloat16 or float32)
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
from torch import Tensor

from bench import gpu_exact, gpu_text
from bench.gpu_log import Facts
from bench.gpu_models import REAL, TINY, Subject, build, build_llama, create, flux_vae, free_memory, wan_vae
from bench.gpu_served import LAYOUTS, Served, same_bytes
from bench.model import Case, Made, Model
from tools import tiny
from unfuse.arena.arena import Arena
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.offload_options import Offload

MIB, GIB = 1 << 20, 1 << 30
BATCHES = (1, 2, 4, 8)
RUNS = 3

#: Steps that are timed.
STEPS = 4

#: Latents of the VAEs: 1024 x 1024, and 832 x 480 with 17 frames.
LATENTS = {"flux": (1, 16, 128, 128), "wan": (1, 16, 5, 60, 104)}
TINY_LATENTS = {"flux": (1, 16, 4, 4), "wan": (1, 16, 2, 4, 4)}

#: Prints the class, its bases, the error code and the text of device errors, each in a process of its own.
ERRORS = """
import sys, torch
def show(what, work):
    try:
        work()
        torch.cuda.synchronize()
        print(what, "-> no error")
    except BaseException as error:
        bases = [kind.__name__ for kind in type(error).__mro__[:3]]
        print(what, "->", bases, getattr(error, "error_code", None), str(error).splitlines()[0])
show("too large", lambda: torch.empty(1 << 42, device="cuda", dtype=torch.uint8))
show("index out of range", lambda: torch.zeros(3, device="cuda")[torch.tensor([5], device="cuda")])
show("next operation", lambda: torch.zeros(3, device="cuda").sum())
show("next copy", lambda: torch.zeros(3).to("cuda"))
"""


def on_gpu(device: str) -> bool:
    return not device.startswith("cpu")


def synchronize(device: str) -> None:
    if on_gpu(device):
        torch.cuda.synchronize(device)


@contextmanager
def peak(device: str, figures: dict[str, Any]) -> Iterator[None]:
    """Add the most GPU memory during the block beyond that at its start, and the memory that torch has reserved."""
    before = 0
    if on_gpu(device):
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    yield
    if on_gpu(device):
        synchronize(device)
        figures["on_top_mib"] = (torch.cuda.max_memory_allocated(device) - before) // MIB
        figures["reserved_mib"] = torch.cuda.memory_reserved(device) // MIB


def timed(work: Callable[[], Any], device: str, times: int = STEPS) -> dict[str, float]:
    """Return milliseconds until the call returns, and until the device is done: medians after two warm-up calls."""
    launched: list[float] = []
    done: list[float] = []
    for _ in range(times + 2):
        synchronize(device)
        began = time.perf_counter()
        work()
        launched.append(time.perf_counter() - began)
        synchronize(device)
        done.append(time.perf_counter() - began)
    return {"launch_ms": round(median(launched[2:]) * 1e3, 2), "ms": round(median(done[2:]) * 1e3, 2)}


def used_memory() -> int:
    """Return MiB of the first GPU that all processes use, by the driver."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])


class Measurements:
    """The parts, for one device."""

    def __init__(self, device: str, root: Path, is_tiny: bool) -> None:
        self.device, self.root, self.is_tiny = device, root, is_tiny
        self.facts = Facts()
        self.subjects = TINY if is_tiny else REAL

    def facts_of_device(self) -> None:
        flags = {
            "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
            "cudnn_tf32": torch.backends.cudnn.allow_tf32,
            "benchmark": torch.backends.cudnn.benchmark,
        }
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]}
        self.facts.measure("versions and flags", lambda: versions | flags)
        if on_gpu(self.device):
            self.facts.measure("context", self._context)
            self.facts.measure("pinned", self._pinned)
            self.facts.measure("errors", self._errors)
        capacity = 16 * MIB if self.is_tiny else 512 * MIB
        self.facts.measure("copies, GiB/s", copies, self.device, capacity)

    def _context(self) -> dict[str, Any]:
        before = used_memory()
        torch.zeros(1, device=self.device)
        context = used_memory() - before
        small = torch.randn(256, 256, device=self.device, dtype=torch.bfloat16)
        images, kernel = torch.randn(1, 8, 64, 64, device=self.device), torch.randn(8, 8, 3, 3, device=self.device)
        query = torch.randn(1, 4, 256, 64, device=self.device, dtype=torch.bfloat16)
        _ = small @ small, torch.nn.functional.conv2d(images, kernel)
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
        synchronize(self.device)
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "context_mib": context,
            "with_libraries_mib": used_memory() - before,
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "cudnn": torch.backends.cudnn.version(),
        }

    def _pinned(self) -> dict[str, Any]:
        pinned = torch.empty(75 * MIB, dtype=torch.uint8).pin_memory()
        stats = torch.cuda.host_memory_stats()
        return {"tensor_mib": pinned.nbytes // MIB, "pinned_mib": stats.get("allocated_bytes.current", 0) // MIB}

    def _errors(self) -> dict[str, Any]:
        output = subprocess.run([sys.executable, "-c", ERRORS], capture_output=True, text=True, timeout=40)
        return {"output": output.stdout.splitlines()}

    def served(self, which: str) -> None:
        with tempfile.TemporaryDirectory() as data:
            folder = tiny.build("flux", Path(data, "flux"))
            usage = used_memory if on_gpu(self.device) else lambda: 0
            self.facts.measure(which, same_bytes, folder, Path(data, "server"), self.device, LAYOUTS[which], usage)

    def text(self) -> None:
        for dtype in ("float32", "bfloat16"):
            self.facts.measure(dtype, gpu_text.compare, build_llama(self.root, True, "cpu"), self.device, dtype)

    def decode(self) -> None:
        folder = build_llama(self.root, self.is_tiny, self.device)
        for texts in (1, 16, 64):
            for temperature in (0.0, 1.0):
                name = f"{texts} texts, {'drawn' if temperature else 'greedy'}"
                self.facts.measure(name, gpu_text.decode_times, folder, self.device, texts, temperature)
                free_memory()

    def steps(self, subject: Subject) -> None:
        folder = build(subject, self.root, self.device)
        for batching in ("batched", "exact"):
            model = Model(folder, ComputeOptions(device=self.device, dtype=self.dtype, batching=batching), self.device)
            for side in subject.sides:
                case = case_of(model, (side, side, 1), STEPS + 3)
                for batch in BATCHES[batching == "exact" :]:
                    self.facts.measure(f"{side}², {batch}, {batching}", self._step, case, subject, batch)
            del model
            free_memory()

    def _step(self, case: Case, subject: Subject, batch: int) -> dict[str, Any]:
        (stage,) = (stage for name, stage in case.model.stages.items() if case.model.specs[name].kind == "denoise")
        states = case.start(stage, [*range(batch)])  # type: ignore[arg-type]
        figures: dict[str, Any] = {"times_blocks": round(subject.blocks_ratio, 2)}
        with peak(self.device, figures), torch.no_grad():
            figures |= timed(lambda: stage.step(states), self.device)
        return figures

    def vae(self, subject: Subject) -> None:
        build_vae = {"flux": flux_vae, "wan": wan_vae}[subject.kind]
        builder = partial(build_vae, 32) if self.is_tiny else build_vae
        variants = ("plain", "benchmark") if subject.kind == "wan" else ("plain", "channels_last", "benchmark")
        for dtype in (torch.float32, torch.bfloat16):
            for variant in variants:
                name = f"{str(dtype).removeprefix('torch.')}, {variant}"
                self.facts.measure(name, self._decode_latents, subject.kind, builder, dtype, variant)
                free_memory()

    def _decode_latents(
        self, kind: str, builder: Callable[[], Any], dtype: torch.dtype, variant: str
    ) -> dict[str, Any]:
        vae = create(builder, self.device, dtype)
        if variant == "channels_last":
            vae = vae.to(memory_format=torch.channels_last)
        shape = (TINY_LATENTS if self.is_tiny else LATENTS)[kind]
        latents = torch.randn(shape, device=self.device, dtype=dtype)
        figures: dict[str, Any] = {}
        torch.backends.cudnn.benchmark = variant == "benchmark"
        try:
            with torch.no_grad(), peak(self.device, figures):
                return figures | timed(lambda: vae.decode(latents, return_dict=False)[0], self.device, 2) | figures
        finally:
            torch.backends.cudnn.benchmark = False

    def offload(self, subject: Subject) -> None:
        folder = build(subject, self.root, self.device)
        for offload in get_args(Offload) if on_gpu(self.device) else ("none",):
            self.facts.measure(offload, self._offloaded, subject, folder, offload)
            free_memory()

    def _offloaded(self, subject: Subject, folder: Path, offload: Offload) -> dict[str, Any]:
        options = ComputeOptions(device=self.device, dtype=self.dtype, offload=offload)
        began = time.monotonic()
        model = Model(folder, options, self.device)
        figures: dict[str, Any] = {"load_s": round(time.monotonic() - began, 1)}
        with peak(self.device, figures):
            seconds = [request_seconds(model, subject) for _ in range(RUNS)]
        figures["request_s"] = [round(value, 2) for value in seconds]
        if on_gpu(self.device):
            figures["pinned_mib"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) // MIB
        return figures

    def stages(self, subject: Subject) -> None:
        folder = build(subject, self.root, self.device)
        sizes: dict[str, int] = {}
        options = ComputeOptions(device=self.device, dtype=self.dtype)
        report = lambda component, _, size: sizes.update({component: size // MIB})  # noqa: E731
        model = Model(folder, options, self.device, report)
        case, tensors = case_of(model, subject.request, subject.steps), Made()
        for name, spec in model.specs.items():
            weights = sum(sizes.get(component, 0) for component in spec.components)
            self.facts.measure(name, self._stage, case, name, tensors, weights)

    def _stage(self, case: Case, name: str, tensors: Made, weights: int) -> dict[str, Any]:
        figures: dict[str, Any] = {"weights_mib": weights}
        with peak(self.device, figures):
            return figures | timed(lambda: case.model.run(name, case.params(1), tensors), self.device, RUNS) | figures

    def verdicts(self) -> None:
        with tempfile.TemporaryDirectory() as root:
            for kind in gpu_exact.FAMILIES:
                self.facts.measure(kind, gpu_exact.families, Path(root), self.device, (kind,))
                free_memory()

    def products(self, dtype: str) -> None:
        layers = {"64 to 128": (64, 128)} if self.is_tiny else gpu_exact.LAYERS
        for name, widths in layers.items():
            compare = partial(gpu_exact.products, self.device, {name: widths}, dtypes=(getattr(torch, dtype),))
            self.facts.measure(name, compare)

    def of_server(self, part: str, subject: Subject) -> None:
        folder = build(subject, self.root, self.device)
        served = Served(folder, self.device, subject.request, subject.steps, subject.sides[0])
        self.facts.measure(part, getattr(served, part))

    @property
    def dtype(self) -> str:
        """The dtype of models that are measured: that of the served ones on a GPU."""
        return "bfloat16" if on_gpu(self.device) else "auto"


def case_of(model: Model, size: tuple[int, int, int], steps: int) -> Case:
    """Return requests of this size for a model."""
    width, height, frames = size
    sizes = {"width": width, "height": height, "num_frames": frames, "num_inference_steps": steps}
    return Case(model, [model.encode(model.params(seed, **sizes)) for seed in range(4)], size, steps)


def request_seconds(model: Model, subject: Subject) -> float:
    """Run one request through all stages. Returns the seconds that it took."""
    case, tensors = Case(model, [], subject.request, subject.steps), Made()
    began = time.monotonic()
    for name in model.specs:
        model.run(name, case.params(1), tensors)
    model.synchronize()
    return time.monotonic() - began


def copies(device: str, capacity: int) -> dict[str, Any]:
    """Return GiB a second between a device and host memory: an arena's, the same registered with CUDA, and pinned."""
    arena = Arena(capacity)
    host = torch.from_numpy(arena.memory)
    rates: dict[str, Any] = {"arena": copy_rates(host, device)}
    if on_gpu(device):
        runtime = torch.cuda.cudart()
        error = int(runtime.cudaHostRegister(host.data_ptr(), capacity, 0))
        rates["arena, registered"] = f"cudaHostRegister failed: {error}" if error else copy_rates(host, device)
        if not error:
            runtime.cudaHostUnregister(host.data_ptr())
        rates["pinned"] = copy_rates(torch.empty(capacity, dtype=torch.uint8, pin_memory=True), device)
    del host
    arena.close()
    return rates


def copy_rates(host: Tensor, device: str) -> dict[str, dict[str, float]]:
    """Return the rates of copies of 1, 16 and 256 MiB to the device and from it."""
    rates = {}
    for size in (MIB, 16 * MIB, 256 * MIB):
        if size <= len(host):
            source, target = host[:size], torch.zeros(size, dtype=torch.uint8, device=device)
            both = {"to_device": (target, source), "from_device": (source, target)}
            rates[f"{size // MIB} MiB"] = {name: round(_rate(*pair, device), 2) for name, pair in both.items()}
    return rates


def _rate(target: Tensor, source: Tensor, device: str) -> float:
    return len(source) / GIB / (timed(lambda: target.copy_(source), device, 5)["ms"] / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--folder", type=Path, default=Path(os.environ.get("GPU_MODELS", "gpu-models")))
    parser.add_argument("--tiny", action="store_true", help="use tiny models on the CPU, to check that all runs")
    parser.add_argument("part", choices=(*PARTS, *SUBJECT_PARTS, *SERVER_PARTS))
    parser.add_argument("subject", nargs="?", default="flux")
    arguments = parser.parse_args()
    if on_gpu(arguments.device) and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: use --device cpu --tiny for a test run on the CPU")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    measurements = Measurements(arguments.device, arguments.folder, arguments.tiny)
    part, subject = arguments.part, arguments.subject
    if part in PARTS:
        PARTS[part](measurements, subject)
    elif part in SUBJECT_PARTS:
        SUBJECT_PARTS[part](measurements, measurements.subjects[subject])
    else:
        measurements.of_server(part, measurements.subjects[subject])
    measurements.facts.end()


#: Parts that are not of a subject, with the word that may follow them.
PARTS: dict[str, Callable[[Measurements, str], None]] = {
    "facts": lambda measurements, _: measurements.facts_of_device(),
    "served": Measurements.served,
    "text": lambda measurements, _: measurements.text(),
    "decode": lambda measurements, _: measurements.decode(),
    "verdicts": lambda measurements, _: measurements.verdicts(),
    "products": Measurements.products,
}

#: Parts of a subject that are measured in this process.
SUBJECT_PARTS: dict[str, Callable[[Measurements, Subject], None]] = {
    "steps": Measurements.steps,
    "vae": Measurements.vae,
    "offload": Measurements.offload,
    "stages": Measurements.stages,
}

#: Parts of a subject that a server is measured for.
SERVER_PARTS = ("rates", "layouts", "stream", "compare")


if __name__ == "__main__":
    main()
