"""The flags by which torch chooses the kernels of CUDA devices."""

from __future__ import annotations

import torch

from unfuse.core.compute_options import Fp32Precision

#: The kernels of scaled_dot_product_attention, by the names of torch's flags.
SDPA_BACKENDS = ("cudnn", "flash", "math", "mem_efficient")


def set_kernel_flags(device: str, precision: Fp32Precision) -> dict[str, str]:
    """Set torch's flags for a CUDA device, and return them as numerics.

    Other devices keep torch's defaults, and have no such numerics. Call this before anything is computed.

    `precision`: whether products and convolutions of float32 round their inputs to TF32.
    """
    if torch.device(device).type != "cuda":
        return {}

    # All versions of torch have these two. They also set `fp32_precision`, which replaces them from 2.9 on; but a
    # library that reads one of these two fails if only `fp32_precision` was set.
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    # With the benchmark, timings choose the algorithm, so that a second run may round differently.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    # All kernels are allowed, as by default: torch chooses by device, dtype and shape.
    for backend in SDPA_BACKENDS:
        getattr(torch.backends.cuda, f"enable_{backend}_sdp")(True)
    return kernel_flags()


def kernel_flags() -> dict[str, str]:
    """Return the flags of this process as numerics, as torch reports them."""
    sdpa = [name for name in SDPA_BACKENDS if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]
    cudnn = [name for name in ("benchmark", "deterministic") if getattr(torch.backends.cudnn, name)]
    tf32 = {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32}
    return {
        "tf32": "+".join(name for name, is_allowed in tf32.items() if is_allowed) or "off",
        "cudnn": "+".join(cudnn) or "default",
        "sdpa": "+".join(sdpa),
    }
