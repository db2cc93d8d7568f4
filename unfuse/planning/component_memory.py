"""The memory of components in workers, and changes that make it smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import msgspec
from msgspec.structs import replace

from unfuse.core.compute_options import SHARD, ParallelDegrees
from unfuse.core.offload_options import Offload, offload_of

#: The component of a language model that is no part of its weights, and always on the device.
KV_CACHE = "keys and values"

LAYER = 2 << 30  # more bytes than any layer of a served model takes; the largest are embeddings of a large vocabulary

#: The least number of blocks for which the weights that FSDP gathers are planned.
BLOCKS = 40

#: Blocks that a rank has gathered at one time: the weights of one, and the buffer of the exchange.
GATHERED = 2

#: The beginning of the advice to use files with quantized weights.
QUANTIZE = "weights in"

#: Such files, by the bytes of a number in relation to bfloat16: Q8_0 has 8.5 bits, Q4_K 4.5, int8 8 and scales.
GGUF = {"GGUF Q8_0": 8.5 / 16, "GGUF Q4_K": 4.5 / 16}
TORCHAO = {"int8 of torchao": 8.5 / 16}

#: How the names of components begin whose weights can be a GGUF file: denoisers, and a language model.
WITH_GGUF = "transformer", "unet", "model"

#: The component of a language model, which torchao does not quantize here; also with an encoder of pictures.
LANGUAGE = "model", "language", "vision"


class ComponentMemory(msgspec.Struct, frozen=True):
    """The memory of one loaded component in one worker."""

    #: Folder of the component within its model, such as vae.
    component: str
    #: Dtype in which it is loaded.
    dtype: str
    #: Bytes in this dtype, on each rank.
    bytes: int
    #: Names of the models that use the component.
    models: tuple[str, ...] = ()
    #: Whether it is mapped from files without conversion: on CPUs, all workers share that memory.
    mapped: bool = False
    #: Bytes, out of `bytes`, that ranks divide among themselves with tensor parallelism.
    tensor_parallel_bytes: int = 0
    #: Whether one copy serves all stages of the worker.
    shared_by_stages: bool = False
    #: Whether each rank has another part of it. Otherwise the ranks of a worker share one copy in host memory.
    differs_by_rank: bool = False
    #: Whether FSDP shards it over ranks. Offloaded shards are in host memory, and gathered block by block.
    is_sharded: bool = False
    #: Whether its weights can be in host memory while they are not used.
    can_offload: bool = True
    #: Predicted bytes on a GPU beside it while it computes one request of the default size.
    activations: int = 0
    #: The same with `--vae tiled`.
    tiled_activations: int = 0
    #: Whether its class is known to compute in float16 without overflow.
    is_float16_safe: bool = False
    #: Bytes of the VAE that its worker loads for the first preview, unless it has the VAE anyway.
    preview_bytes: int = 0

    def stored_as(self, dtype: str) -> ComponentMemory:
        """Return the component in this dtype; unchanged if it cannot have that dtype.

        Only a float32 component that is no VAE can have a smaller dtype.
        """
        can_be_smaller = self.dtype == "float32" and not self.component.startswith("vae")
        if self.dtype == dtype or not (can_be_smaller or dtype == "float32"):
            return self
        return replace(self.scaled(2 if dtype == "float32" else 1 / 2), dtype=dtype, mapped=False)

    def scaled(self, factor: float) -> ComponentMemory:
        """Return the component with all its numbers in a dtype of other size."""
        fields = ("bytes", "tensor_parallel_bytes", "activations", "tiled_activations")
        return replace(self, **{name: int(getattr(self, name) * factor) for name in fields})

    def of_rank(self, spread: ParallelDegrees) -> ComponentMemory:
        """Return the part of it on one rank."""
        absent_bytes = self.tensor_parallel_bytes - -(-self.tensor_parallel_bytes // spread.degrees.get("tensor", 1))
        rank_bytes = -(-(self.bytes - absent_bytes) // spread.parts)
        tokens = spread.degrees.get("ulysses", 1) * spread.degrees.get("ring", 1)
        is_sharded = SHARD in spread.degrees
        gathered = GATHERED * self.bytes // BLOCKS if is_sharded else 0
        part = replace(self, activations=-(-self.activations // tokens) + gathered, is_sharded=is_sharded)
        return replace(part, bytes=rank_bytes, mapped=False, differs_by_rank=True) if rank_bytes < self.bytes else part

    def offload(self, text: str) -> Offload:
        """Return how it is offloaded with this value of `--offload`."""
        return offload_of(text, self.component) if self.can_offload and self.component != KV_CACHE else "none"

    def resident(self, offload: Offload) -> int:
        """Return the most bytes of it on a GPU at one time, with this offload.

        With `sequential`, that is one layer, except for a VAE. With FSDP, it is the rank's share of the block that
        is gathered next. What is gathered counts as activations.
        """
        if self.is_sharded and offload != "none":
            return -(-self.bytes // BLOCKS)
        by_layer = offload == "sequential" and not self.component.startswith("vae")
        return min(self.bytes, LAYER) if by_layer else self.bytes


Needs = Mapping[str, tuple[ComponentMemory, ...]]
"""The components that each worker of a role loads, by role."""


def smaller_needs(needs: Needs, *, on_gpu: bool, has_bfloat16: bool = True) -> Iterator[tuple[str, Needs]]:
    """Yield changes of how components are loaded and used, each with its needs.

    `has_bfloat16`: whether all GPUs compute in bfloat16.
    """
    yield from _smaller_dtypes(needs, on_gpu=on_gpu, has_bfloat16=has_bfloat16)
    if not on_gpu:
        return
    yield "--vae tiled", _changed(needs, lambda part: replace(part, activations=part.tiled_activations))
    yield (
        "half the pixels in serving.json",
        _changed(needs, lambda part: replace(part, activations=part.activations // 2)),
    )
    if any(part.component == KV_CACHE for parts in needs.values() for part in parts):
        yield (
            "a limit max_tokens in serving.json of a quarter of the model's",
            _changed(
                needs,
                lambda part: (
                    replace(part, bytes=part.bytes // 4, tensor_parallel_bytes=part.tensor_parallel_bytes // 4)
                    if part.component == KV_CACHE
                    else part
                ),
            ),
        )


def _smaller_dtypes(needs: Needs, *, on_gpu: bool, has_bfloat16: bool) -> Iterator[tuple[str, Needs]]:
    """Yield smaller dtypes of components, each with the needs."""
    if not has_bfloat16:
        changed = _changed(needs, lambda part: part.stored_as("float16"))
        pairs = ((part, new) for role, parts in needs.items() for part, new in zip(parts, changed[role], strict=True))
        overflows = any(part != new and not part.is_float16_safe for part, new in pairs)
        yield "--dtype float16,vae=float32" + (" (which may overflow)" if overflows else ""), changed
        return
    yield "--dtype bfloat16", _changed(needs, lambda part: part.stored_as("bfloat16"))
    if on_gpu:
        yield (
            "--dtype vae=bfloat16",
            _changed(
                needs,
                lambda part: (
                    replace(part.scaled(1 / 2), dtype="bfloat16")
                    if part.component.startswith("vae") and part.dtype == "float32"
                    else part
                ),
            ),
        )


def quantized_needs(needs: Needs, *, torchao: bool) -> Iterator[tuple[str, Needs]]:
    """Yield other files for the largest components, with the needs after each: (text, needs).

    `torchao`: whether weights of torchao are offered, which can neither be offloaded nor divided.
    """

    def quantizable(part: ComponentMemory, kind: str) -> bool:
        is_supported = part.component.startswith(WITH_GGUF) if kind in GGUF else part.component not in LANGUAGE
        return (
            is_supported and part.dtype in ("bfloat16", "float16") and part.bytes > LAYER and part.component != KV_CACHE
        )

    def quantize(part: ComponentMemory, kind: str, factor: float) -> ComponentMemory:
        if not quantizable(part, kind):
            return part
        size = int(part.bytes * factor)
        can_offload = part.can_offload and kind in GGUF
        return replace(part, dtype=kind, bytes=size, tensor_parallel_bytes=0, mapped=False, can_offload=can_offload)

    for kind, factor in (GGUF | (TORCHAO if torchao else {})).items():
        names = dict.fromkeys(part.component for parts in needs.values() for part in parts if quantizable(part, kind))
        if names:
            of = "" if [*names] == ["model"] else f" for {' and '.join(names)}"
            yield f"{QUANTIZE} {kind}{of}", _changed(needs, partial(quantize, kind=kind, factor=factor))


def _changed(needs: Needs, change: Callable[[ComponentMemory], ComponentMemory]) -> Needs:
    """Return the needs after a change of each component."""
    return {role: tuple(map(change, parts)) for role, parts in needs.items()}
