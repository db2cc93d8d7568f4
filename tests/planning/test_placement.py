"""Which worker runs where: whatever the devices and whatever is wanted, nothing is put where it has no room."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, strategies as st
from msgspec.structs import replace

from unfuse.core.compute_device import CONTEXT
from unfuse.core.compute_options import ComputeOptions, ParallelDegrees
from unfuse.core.errors import ConfigError
from unfuse.planning.component_memory import KV_CACHE, LAYER, ComponentMemory
from unfuse.planning.kv_memory import SHARE, with_kv_caches
from unfuse.planning.placement import (
    CPU,
    EXCHANGE_BUFFERS,
    PROCESS,
    Device,
    PlacedWorker,
    WorkerPlan,
    devices_of,
    left_bytes,
    parse_place,
    parse_workers,
    place_workers,
    taken_bytes,
)

GIB = 1 << 30
RANK = CONTEXT + EXCHANGE_BUFFERS
HOST = Device(CPU, 64 * GIB)

T5 = ComponentMemory("text_encoder", "bfloat16", 10 * GIB)
CLIP = ComponentMemory("image_encoder", "bfloat16", GIB)
TRANSFORMER = ComponentMemory("transformer", "bfloat16", 24 * GIB)
VAE = ComponentMemory("vae", "float32", GIB // 2)
ROLES = ("encoder", "denoiser", "decoder")
NEEDS = {"encoder": (T5, CLIP), "denoiser": (TRANSFORMER,), "decoder": (VAE,)}


def gpus(*free: float) -> tuple[Device, ...]:
    """The host, and GPUs with that many GiB free."""
    return (HOST, *(Device(f"cuda:{number}", int(gib * GIB)) for number, gib in enumerate(free)))


def wanted(place: str = "", device: str = "auto", offload: str = "none", arena: int = 0, **counts: int) -> WorkerPlan:
    roles = {role: counts.get(role, 1) for role in ROLES} if counts else None
    compute = ComputeOptions(device=device, offload=offload)
    return WorkerPlan(
        roles,
        parse_place(place),
        compute,
        arena,
        first=frozenset({"denoiser"}),
        shardable_roles=frozenset({"denoiser"}),
    )


def seats(placed: tuple[PlacedWorker, ...]) -> list[tuple[str, str]]:
    return [(worker.role, worker.device) for worker in placed]


def refusal(needs: dict[str, tuple[ComponentMemory, ...]], want: WorkerPlan, devices: tuple[Device, ...]) -> str:
    with pytest.raises(ConfigError) as caught:
        place_workers(needs, want, devices)
    return str(caught.value)


def test_all_workers_are_placed_on_the_cpu_without_a_gpu() -> None:
    placed = place_workers(NEEDS, wanted(arena=GIB), (HOST,))
    assert seats(placed) == [("encoder", CPU), ("denoiser", CPU), ("decoder", CPU)]
    assert taken_bytes(placed, wanted(arena=GIB)) == {CPU: (10 + 1 + 24) * GIB + GIB // 2 + 3 * (PROCESS + GIB)}


def test_one_gpu_with_enough_memory_runs_all_roles() -> None:
    placed = place_workers(NEEDS, wanted(), gpus(40))
    assert {device for _, device in seats(placed)} == {"cuda:0"}
    assert taken_bytes(placed, wanted()) == {"cuda:0": 35 * GIB + GIB // 2 + 3 * CONTEXT, CPU: 3 * PROCESS}


def test_denoisers_are_placed_first_on_gpus_with_most_free_memory() -> None:
    placed = place_workers(NEEDS, wanted(denoiser=2), gpus(30, 48, 47))
    assert seats(placed) == [
        ("encoder", "cuda:0"),
        ("denoiser", "cuda:1"),
        ("denoiser", "cuda:2"),
        ("decoder", "cuda:1"),
    ]


def test_named_devices_are_used_round_robin() -> None:
    want = wanted("encoder=cpu,denoiser=cuda:1,denoiser=cuda", decoder=3, denoiser=3)
    placed = place_workers(NEEDS, want, gpus(80, 80))
    assert seats(placed)[:4] == [
        ("encoder", CPU),
        ("denoiser", "cuda:1"),
        ("denoiser", "cuda:0"),
        ("denoiser", "cuda:1"),
    ]
    assert seats(placed)[4:] == [("decoder", "cuda:0")] * 3


def test_role_placed_twice_on_the_cpu_starts_two_workers() -> None:
    placed = place_workers(NEEDS, wanted("encoder=cpu,denoiser=cpu,denoiser=cpu,decoder=cpu"), (HOST,))
    assert [role for role, _ in seats(placed)] == ["encoder", "denoiser", "denoiser", "decoder"]


def test_device_option_applies_to_roles_without_a_place() -> None:
    placed = place_workers(NEEDS, wanted("decoder=cpu", device="cuda:1"), gpus(80, 40))
    assert seats(placed) == [("encoder", "cuda:1"), ("denoiser", "cuda:1"), ("decoder", CPU)]


def test_role_with_zero_workers_needs_no_memory() -> None:
    assert seats(place_workers(NEEDS, wanted(denoiser=0), gpus(14))) == [("encoder", "cuda:0"), ("decoder", "cuda:0")]
    assert place_workers(NEEDS, WorkerPlan({}, {}, ComputeOptions(device="cuda:7")), (HOST,)) == ()


@pytest.mark.parametrize(
    ("counts", "named", "said"),
    [
        (None, "all=cpu", "--place all: no worker of that name is started, only: encoder, denoiser, decoder"),
        ({"all": 1}, "denoiser=cpu", "--place denoiser: no worker of that name is started, only: all"),
        ({"all": 1, "decoder": 0}, "all=cpu,decoder=cpu", "place one of these, or add decoder=1 to --workers"),
        ({}, "decoder=cpu", "--place decoder: no worker of that name is started, only: none"),
    ],
)
def test_place_of_an_unstarted_worker_raises_config_error(counts: dict[str, int] | None, named: str, said: str) -> None:
    assert said in refusal(NEEDS, WorkerPlan(counts, parse_place(named)), (HOST,))


def test_model_offload_runs_all_roles_of_a_gpu_in_one_worker() -> None:
    want = wanted(offload="model", arena=GIB)
    (worker,) = place_workers(NEEDS, want, gpus(25))
    assert (worker.role, worker.device, worker.parts) == ("all", "cuda:0", (T5, CLIP, TRANSFORMER, VAE))
    assert worker.device_bytes(want) == {"cuda:0": 24 * GIB + CONTEXT, CPU: 35 * GIB + GIB // 2 + PROCESS + GIB}


def test_model_offload_runs_roles_separately_without_the_denoiser() -> None:
    want = wanted("encoder=cuda:0,decoder=cuda:0,denoiser=cuda:1", offload="model")
    placed = place_workers(NEEDS, want, gpus(12, 25))
    assert len(placed) == 3
    assert taken_bytes(placed, want)["cuda:0"] == 10 * GIB + GIB // 2 + 2 * CONTEXT


def test_sequential_offload_needs_one_layer_or_a_full_vae_per_worker() -> None:
    big_vae = ComponentMemory("vae", "float32", 3 * GIB)
    want = wanted(offload="sequential")
    placed = place_workers({**NEEDS, "decoder": (big_vae,)}, want, gpus(10))
    assert [worker.device_bytes(want)["cuda:0"] - CONTEXT for worker in placed] == [LAYER, LAYER, 3 * GIB]


def test_offload_of_single_components_leaves_the_others_on_the_gpu() -> None:
    want = wanted(offload="text_encoder=model,vae=model", arena=GIB)
    (worker,) = place_workers(NEEDS, want, gpus(40))
    assert (worker.role, worker.parts) == ("all", (T5, CLIP, TRANSFORMER, VAE))
    assert worker.device_bytes(want) == {
        "cuda:0": (24 + 1 + 10) * GIB + CONTEXT,
        CPU: 10 * GIB + GIB // 2 + PROCESS + GIB,
    }
    assert seats(place_workers(NEEDS, wanted(offload="transformer=sequential"), gpus(40))) == [
        (role, "cuda:0") for role in ROLES
    ]
    assert "needs a GPU" in refusal(NEEDS, wanted(offload="vae=model"), (HOST,))
    assert place_workers(NEEDS, wanted(offload="none,vae=none"), (HOST,))


def test_kv_cache_and_fixed_components_stay_on_the_gpu_with_offload() -> None:
    kv, fixed = ComponentMemory(KV_CACHE, "bfloat16", 3 * GIB), replace(T5, component="checker", can_offload=False)
    want = wanted(offload="model")
    (worker,) = place_workers({"prefill": (TRANSFORMER, kv, fixed)}, replace(want, counts={"prefill": 1}), gpus(40))
    assert worker.device_bytes(want) == {"cuda:0": (24 + 3 + 10) * GIB + CONTEXT, CPU: 24 * GIB + PROCESS}


def test_advised_offload_leaves_out_components_that_cannot_be_offloaded() -> None:
    needs = {**NEEDS, "denoiser": (replace(TRANSFORMER, can_offload=False),)}
    advised = "--offload model,transformer=none"
    assert f"it would fit with {advised}, or with" in refusal(needs, wanted(), gpus(35.2))
    (worker,) = place_workers(needs, wanted(offload="model,transformer=none"), gpus(35.2))
    assert worker.device_bytes(wanted(offload="model,transformer=none"))["cuda:0"] == 34 * GIB + CONTEXT


@pytest.mark.parametrize("offload", ["model", "sequential"])
def test_offload_without_a_gpu_raises_config_error(offload: str) -> None:
    assert "needs a GPU" in refusal(NEEDS, wanted(offload=offload), (HOST,))
    assert "needs a GPU" in refusal(NEEDS, wanted(offload=offload, device="cpu"), gpus(80))


def test_cpu_worker_is_unaffected_by_offload_of_gpu_workers() -> None:
    want = wanted("decoder=cpu", offload="model")
    placed = place_workers(NEEDS, want, gpus(40))
    assert seats(placed) == [("encoder", "cuda:0"), ("denoiser", "cuda:0"), ("decoder", CPU)]
    assert placed[-1].device_bytes(want) == {CPU: GIB // 2 + PROCESS}


def test_out_of_memory_error_lists_needs_free_memory_and_options() -> None:
    text = refusal(NEEDS, wanted(decoder=2), gpus(32))
    assert (
        "cuda:0 would need 38.8 GiB (encoder 11.7 GiB + denoiser 24.7 GiB + decoder 1.2 GiB + decoder 1.2 GiB)" in text
    )
    assert "has 32.0 GiB free" in text
    assert "cpu has 64.0 GiB free" in text
    assert "it would fit with --offload model, or with --offload sequential, or with weights in GGUF Q8_0 for t" in text
    assert "or with --place encoder=cpu" in text
    assert "decoder=cpu" not in text


def test_offload_is_not_suggested_for_weights_that_stay_on_the_device() -> None:
    fixed = {**NEEDS, "denoiser": (replace(TRANSFORMER, can_offload=False),)}
    text = refusal(fixed, wanted(), gpus(30))
    assert text.count("--offload") == text.count("--offload sequential,transformer=none") == 1
    assert "--offload model" in refusal(NEEDS, wanted(), gpus(30))


def test_refusal_names_two_changes_where_one_is_not_enough() -> None:
    busy = {**NEEDS, "decoder": (replace(VAE, activations=20 * GIB, tiled_activations=GIB),)}
    fixed = {role: tuple(replace(part, can_offload=False) for part in parts) for role, parts in busy.items()}
    text = refusal(fixed, replace(wanted(), shardable_roles=frozenset()), gpus(26))
    assert "it would fit with --vae tiled and weights in GGUF Q4_K for transformer" in text


def test_quantized_weights_are_suggested_only_where_they_are_served() -> None:
    """GGUF is read for denoisers and language models, and torchao's weights are neither moved nor divided."""
    text = refusal(NEEDS, wanted(), gpus(24))
    assert "weights in int8 of torchao for text_encoder and transformer" in text
    assert "GGUF Q4_K for transformer" in text
    assert "GGUF Q4_K for text_encoder" not in text
    assert "torchao" not in refusal(NEEDS, wanted(offload="model"), gpus(12))
    parallel = replace(wanted(), compute=ComputeOptions(parallel="denoiser=shard:2"))
    assert "weights in" not in refusal(NEEDS, parallel, gpus(12, 12))


def test_second_change_is_not_suggested_where_the_first_is_enough() -> None:
    large = {**NEEDS, "encoder": (replace(T5, bytes=30 * GIB),)}
    text = refusal(large, replace(wanted(), shardable_roles=frozenset()), gpus(24))
    assert "--offload sequential" in text
    assert "--offload sequential and" not in text


def test_refusal_advises_float16_on_gpus_without_bfloat16() -> None:
    """As float32 is, of which the user knows: a dtype of 16 bits by hand."""
    float32 = {role: tuple(part.stored_as("float32") for part in parts) for role, parts in NEEDS.items()}
    devices = [replace(device, has_bfloat16=device.name == CPU) for device in gpus(40)]
    assert "it would fit with --dtype float16,vae=float32 (which may overflow)" in refusal(float32, wanted(), devices)
    safe = {role: tuple(replace(part, is_float16_safe=True) for part in parts) for role, parts in float32.items()}
    text = refusal(safe, wanted(), devices)
    assert "it would fit with --dtype float16,vae=float32, or with" in text
    assert "bfloat16" not in text
    assert "--dtype bfloat16" in refusal(safe, wanted(), gpus(40))


def integrated(host: float) -> tuple[Device, ...]:
    """A machine with so many GiB for the host and its GPU together, as a GB10."""
    return Device(CPU, int(host * GIB)), Device("cuda:0", int(host * GIB), uses_host_memory=True)


def test_integrated_gpu_and_host_are_planned_for_one_memory() -> None:
    """The workers need 37.6 GiB of a GPU, and 6.8 GiB of the host."""
    want = wanted(arena=2 * GIB)
    assert taken_bytes(place_workers(NEEDS, want, gpus(40)), want)["cuda:0"] < 40 * GIB
    text = refusal(NEEDS, want, integrated(40))
    sums = "44.5 GiB (encoder 14.0 GiB + denoiser 27.0 GiB + decoder 3.5 GiB) and has 40.0 GiB free"
    assert f"cpu and cuda:0 (one memory) would need {sums}; it would fit with --arena 64MiB, or with weights" in text
    assert "--offload" not in text, "it frees no memory there"
    assert place_workers(NEEDS, want, integrated(50))


def test_other_workers_on_the_cpu_leave_less_to_an_integrated_gpu() -> None:
    assert left_bytes({CPU: 10 * GIB, "cuda:0": 5 * GIB}, integrated(40)) == {CPU: 25 * GIB, "cuda:0": 25 * GIB}
    assert left_bytes({CPU: 10 * GIB, "cuda:0": 5 * GIB}, gpus(40)) == {CPU: 54 * GIB, "cuda:0": 35 * GIB}
    capped = (integrated(40)[0], replace(integrated(40)[1], free=6 * GIB))
    assert left_bytes({CPU: 10 * GIB, "cuda:0": 5 * GIB}, capped) == {CPU: 25 * GIB, "cuda:0": GIB}


def test_kv_cache_of_an_integrated_gpu_leaves_the_memory_of_the_host() -> None:
    kv = ComponentMemory(KV_CACHE, "bfloat16", GIB, shared_by_stages=True)
    want = replace(WorkerPlan(arena=8 * GIB), counts={"all": 1})
    needs = {"prefill": (TRANSFORMER, kv)}
    (worker,) = with_kv_caches(place_workers(needs, want, integrated(64)), want, integrated(64))
    assert sum(taken_bytes([worker], want).values()) < 64 * GIB
    (separate,) = with_kv_caches(place_workers(needs, want, gpus(64)), want, gpus(64))
    difference = taken_bytes([separate], want)["cuda:0"] - taken_bytes([worker], want)["cuda:0"]
    assert abs(difference - SHARE * (8 * GIB + PROCESS)) < 2


A100, L4 = "NVIDIA A100", "NVIDIA L4"


def mixed(*models: str) -> tuple[Device, ...]:
    """GPUs of these models, each with 5 GiB less than the one before."""
    found = gpus(*(80 - 5 * index for index in range(len(models))))
    return (HOST, *(replace(device, model=model) for device, model in zip(found[1:], models, strict=True)))


def test_ranks_are_placed_on_gpus_of_one_model() -> None:
    want = spread("ulysses:2", place="encoder=cpu,decoder=cpu")
    for models, denoiser in (
        ((L4, A100, A100), "cuda:1+cuda:2"),
        ((L4, A100, L4, A100), "cuda:0+cuda:2"),
        ((L4, L4, A100, A100), "cuda:0+cuda:1"),
        (("", "", ""), "cuda:0+cuda:1"),
    ):
        assert seats(place_workers(NEEDS, want, mixed(*models)))[1] == ("denoiser", denoiser)


def test_ranks_on_unequal_gpus_are_refused_with_the_models() -> None:
    sentence = (
        "the ranks of a worker need GPUs of one model, since results depend on it, and for the denoiser cuda:0 is "
        "NVIDIA A100, cuda:1 is NVIDIA L4: name GPUs of one model by --device or --place, or use fewer ranks"
    )
    want = spread("ulysses:2", place="encoder=cpu,decoder=cpu")
    assert refusal(NEEDS, want, mixed(A100, L4)) == sentence
    want = spread("ulysses:2", place="encoder=cpu,decoder=cpu,denoiser=cuda:0+cuda:1")
    assert refusal(NEEDS, want, mixed(A100, L4, A100)) == sentence
    shards = wanted("encoder=cpu")
    small = [replace(device, free=20 * GIB) if device.name != CPU else device for device in mixed(A100, L4)]
    assert "--parallel denoiser=shard:2" not in refusal(NEEDS, shards, tuple(small))
    equal = [replace(device, free=20 * GIB) if device.name != CPU else device for device in mixed(L4, L4)]
    assert "--parallel denoiser=shard:2" in refusal(NEEDS, shards, tuple(equal))


def test_worker_is_planned_with_the_largest_activations_of_its_components() -> None:
    parts = (replace(T5, activations=GIB), replace(TRANSFORMER, activations=3 * GIB))
    worker = PlacedWorker("all", "cuda:0", parts)
    assert worker.device_bytes(WorkerPlan())["cuda:0"] == CONTEXT + (10 + 24 + 3) * GIB
    assert worker.device_bytes(wanted(offload="model"))["cuda:0"] == CONTEXT + (24 + 3) * GIB
    assert PlacedWorker("all", CPU, parts).device_bytes(WorkerPlan()) == {CPU: PROCESS + 34 * GIB}


def test_sequence_parallel_ranks_share_the_activations() -> None:
    needs = {**NEEDS, "denoiser": (replace(TRANSFORMER, activations=4 * GIB),)}
    want = spread("ulysses:2", place="encoder=cpu,decoder=cpu")
    (_, denoiser, _) = place_workers(needs, want, gpus(40, 40))
    assert denoiser.device_bytes(want)["cuda:1"] == RANK + (24 + 2) * GIB


def test_out_of_memory_error_suggests_only_options_that_fit() -> None:
    small = (Device(CPU, GIB), Device("cuda:0", GIB))
    assert "are enough: more memory is needed" in refusal(NEEDS, wanted(), small)
    float32 = {role: tuple(part.stored_as("float32") for part in parts) for role, parts in NEEDS.items()}
    assert "it would fit with --dtype bfloat16" in refusal(float32, wanted(), (Device(CPU, 40 * GIB),))
    assert "it would fit with --arena 64MiB" in refusal(NEEDS, wanted(arena=2 * GIB), (Device(CPU, 40 * GIB),))
    assert "it would fit with one worker for each role" in refusal(NEEDS, wanted(denoiser=2), (Device(CPU, 40 * GIB),))


@pytest.mark.parametrize(
    ("want", "says"),
    [
        (wanted("decoder=cuda:4"), "no device cuda:4 for the decoder; available are cpu, cuda:0"),
        (wanted(device="tpu"), "tpu"),
    ],
)
def test_missing_device_raises_error_listing_available_devices(want: WorkerPlan, says: str) -> None:
    assert says in refusal(NEEDS, want, gpus(80))


@pytest.mark.parametrize("text", ["encoder", "=cpu", "encoder=", "encoder:cpu"])
def test_malformed_place_raises_error_with_the_syntax(text: str) -> None:
    with pytest.raises(ConfigError, match="is not ROLE=DEVICE$"):
        parse_place(text)


@pytest.mark.parametrize("devices", ["cuda+cuda:0", "cuda:1 + cuda:1", "xpu:0+cuda:0+xpu"])
def test_gpu_named_twice_for_one_worker_raises_config_error(devices: str) -> None:
    """Whether or not its roles have ranks, and as `--device` or as `--place`."""
    with pytest.raises(ConfigError, match=r"^--place encoder=.*: two ranks cannot use the same GPU, and \S+ is named"):
        parse_place(f"denoiser=cpu, encoder={devices}")
    with pytest.raises(ConfigError, match=r"^--device .*: two ranks cannot use the same GPU, and \S+ is named twice"):
        place_workers(NEEDS, wanted(device=devices), gpus(80, 40))


def test_place_may_be_empty_or_contain_spaces() -> None:
    assert parse_place("") == {}
    assert parse_place("all=xpu,decoder=mps+xpu:1") == {"all": ("xpu:0",), "decoder": ("mps:0+xpu:1",)}
    text = "encoder = cpu, denoiser=cuda,denoiser = cuda:1"
    assert parse_place(text) == {"encoder": (CPU,), "denoiser": ("cuda:0", "cuda:1")}


def spread(how: str, device: str = "auto", place: str = "", offload: str = "none") -> WorkerPlan:
    """Three workers, of which denoisers are spread so."""
    plain = wanted(place, device, offload)
    return replace(plain, compute=replace(plain.compute, parallel=f"denoiser={how}"))


def test_ranks_with_full_weights_use_gpus_with_most_free_memory() -> None:
    want = spread("ulysses:2+cfg:2")
    placed = place_workers(NEEDS, want, gpus(20, 48, 30, 47, 46))
    assert seats(placed)[1] == ("denoiser", "cuda:1+cuda:3+cuda:4+cuda:2")
    (denoiser,) = (worker for worker in placed if worker.role == "denoiser")
    assert denoiser.device_bytes(want) == {**{f"cuda:{n}": 24 * GIB + RANK for n in (1, 2, 3, 4)}, CPU: 4 * PROCESS}
    assert "cfg:2+ulysses:2 needs 4 GPUs, and there are 3: cuda:0, cuda:1, cuda:2" in refusal(
        NEEDS, want, gpus(20, 48, 30)
    )


def test_ranks_share_one_copy_of_full_weights_in_host_memory() -> None:
    want, mapped = spread("ring:3"), ComponentMemory("transformer", "float32", 24 * GIB, mapped=True)
    for part in (TRANSFORMER, mapped):
        (worker,) = place_workers(
            {"denoiser": (part,)}, replace(want, counts={"denoiser": 1}), (Device(CPU, 200 * GIB),)
        )
        assert worker.device == "cpu+cpu+cpu"
        assert worker.device_bytes(want) == {CPU: 3 * PROCESS + 24 * GIB}
    resting = replace(want, compute=replace(want.compute, offload="model"), counts={"denoiser": 1})
    (worker,) = place_workers({"denoiser": (TRANSFORMER,)}, resting, gpus(30, 30, 30))
    assert worker.device_bytes(resting)[CPU] == 3 * PROCESS + 24 * GIB


@pytest.mark.parametrize("how", ["shard:2", "layers:2"])
def test_ranks_with_partial_weights_fit_where_full_weights_do_not(how: str) -> None:
    """Of the others each rank that needs them holds the whole: here nothing but the transformer is the denoiser's."""
    text = refusal(NEEDS, wanted("encoder=cpu,decoder=cpu"), gpus(16, 16))
    assert "it would fit with --parallel denoiser=shard:2, or with --offload sequential" in text
    want = spread(how, place="encoder=cpu,decoder=cpu")
    placed = place_workers(NEEDS, want, gpus(16, 16))
    assert seats(placed)[1] == ("denoiser", "cuda:0+cuda:1")
    gathered = 24 * GIB // 20 if how.startswith("shard") else 0
    rank_bytes = RANK + 12 * GIB + gathered
    assert placed[1].device_bytes(want) == {"cuda:0": rank_bytes, "cuda:1": rank_bytes, CPU: 2 * PROCESS}
    with pytest.raises(ConfigError, match="do not fit"):
        place_workers(NEEDS, spread("ulysses:2", place="encoder=cpu,decoder=cpu"), gpus(16, 16))


def test_shard_divides_only_denoiser_weights_which_are_not_mmapped() -> None:
    mapped = {role: tuple(replace(part, mapped=True) for part in parts) for role, parts in NEEDS.items()}
    want = replace(spread("ulysses:2+shard:2"), counts={"all": 1})
    (whole,) = place_workers(mapped, want, (HOST,))
    assert [part.bytes for part in whole.parts] == [10 * GIB, GIB, 12 * GIB, GIB // 2]
    assert whole.device_bytes(want) == {CPU: 2 * PROCESS + (11 + 24) * GIB + GIB // 2}


def test_tensor_parallel_divides_only_tensor_parallel_bytes() -> None:
    shared = replace(TRANSFORMER, tensor_parallel_bytes=16 * GIB)
    needs = {**NEEDS, "denoiser": (shared,)}
    want = spread("tensor:4", place="encoder=cpu,decoder=cpu")
    placed = place_workers(needs, want, gpus(13, 13, 13, 13))
    assert placed[1].device_bytes(want) == {**{f"cuda:{n}": RANK + 12 * GIB for n in range(4)}, CPU: 4 * PROCESS}
    with pytest.raises(ConfigError, match="do not fit"):
        place_workers(NEEDS, want, gpus(13, 13, 13, 13))
    halved = replace(shared, dtype="float32").stored_as("bfloat16")
    assert (shared.stored_as("float32").tensor_parallel_bytes, halved.tensor_parallel_bytes) == (32 * GIB, 8 * GIB)
    mapped = replace(shared, mapped=True)
    assert [mapped.of_rank(ParallelDegrees.parse(how)).mapped for how in ("cfg:2", "tensor:2")] == [True, False]


def test_out_of_memory_error_suggests_adding_shard_to_parallel() -> None:
    want = spread("ulysses:4", place="encoder=cpu,decoder=cpu")
    text = refusal(NEEDS, replace(want, shardable_roles=frozenset({"denoiser"})), gpus(16, 16, 16, 16))
    assert "it would fit with --parallel denoiser=ulysses:4+shard:4" in text
    assert "shard" not in refusal(NEEDS, replace(want, shardable_roles=frozenset()), gpus(16, 16, 16, 16))
    for how, advised in (("shard:2", True), ("layers:2", False), ("tensor:2", False)):
        text = refusal(NEEDS, spread(how, place="encoder=cpu,decoder=cpu"), gpus(9, 9))
        assert ("it would fit with --offload model, or with --offload sequential" in text) == advised
        assert ("with --offload" in text) == advised
        assert "with --parallel" not in text


@pytest.mark.parametrize("offload", ["model", "sequential"])
def test_offloaded_shards_of_all_ranks_are_in_host_memory(offload: str) -> None:
    """On each GPU are the gathered blocks, and this rank's shards of the next one."""
    want = spread("shard:2", place="encoder=cpu,decoder=cpu", offload=offload)
    placed = place_workers(NEEDS, want, gpus(4, 4))
    rank_bytes = RANK + 24 * GIB // 20 + -(-12 * GIB // 40)
    assert placed[1].device_bytes(want) == {"cuda:0": rank_bytes, "cuda:1": rank_bytes, CPU: 2 * PROCESS + 24 * GIB}
    assert "cuda:0 would need" in refusal(NEEDS, want, gpus(2, 2))
    (host, *devices) = gpus(4, 4)
    assert "cpu would need" in refusal(NEEDS, want, (replace(host, free=30 * GIB), *devices))


def test_offloaded_shards_make_room_for_other_components_of_their_worker() -> None:
    """Shards are on the device only while they are computed with, when no other component is."""
    want = replace(spread("shard:2", offload="model"), counts={"all": 1})
    (worker,) = place_workers(NEEDS, want, gpus(12, 12))
    assert worker.device_bytes(want)["cuda:0"] == RANK + 10 * GIB
    assert worker.device_bytes(want)[CPU] == 2 * PROCESS + sum(part.bytes for part in (T5, CLIP, VAE)) + 24 * GIB


def test_ranks_must_fit_on_the_smallest_of_their_gpus() -> None:
    want = spread("ring:2", place="encoder=cpu,denoiser=cuda:0+cuda:1,decoder=cpu")
    assert place_workers(NEEDS, want, gpus(80, 25))
    assert "the models do not fit: cuda:1 would need" in refusal(NEEDS, want, gpus(80, 24))


def test_ranks_are_placed_on_the_named_devices() -> None:
    placed = place_workers(
        NEEDS, spread("ring:2", place="denoiser=cuda:2+cuda:0,denoiser=cuda:1+cuda"), gpus(90, 80, 80)
    )
    assert [device for role, device in seats(placed) if role == "denoiser"] == ["cuda:2+cuda:0", "cuda:1+cuda:0"]
    placed = place_workers(NEEDS, spread("ring:2", device="cuda:0+cuda:1"), gpus(60, 80, 80))
    assert seats(placed) == [("encoder", "cuda:1"), ("denoiser", "cuda:0+cuda:1"), ("decoder", "cuda:1")]


@pytest.mark.parametrize(
    ("want", "says"),
    [
        (spread("ring:2", place="denoiser=cuda:0"), "here 2 [(]--parallel: denoiser=ring:2[)]"),
        (spread("ring:2", device="cpu+cpu+cpu"), "such as cpu[+]cpu or cuda:0[+]cuda:1"),
        (spread("ring:2", place="denoiser=cuda:0+cuda:7"), "there is no device cuda:7 for the denoiser"),
        (spread("ring:2", device="cpu+cpu", offload="model"), "needs a GPU"),
    ],
)
def test_devices_that_do_not_match_ranks_raise_config_error(want: WorkerPlan, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        place_workers(NEEDS, want, gpus(80, 80))


def test_worker_may_combine_several_roles() -> None:
    want = WorkerPlan(parse_workers("encoder+decoder, denoiser=2"), first=frozenset({"denoiser"}))
    placed = place_workers(NEEDS, want, (HOST,))
    assert [(worker.role, worker.parts) for worker in placed] == [
        ("encoder+decoder", (T5, CLIP, VAE)),
        ("denoiser", (TRANSFORMER,)),
        ("denoiser", (TRANSFORMER,)),
    ]
    (whole,) = place_workers(NEEDS, WorkerPlan({"all": 1}), (HOST,))
    assert whole.parts == (T5, CLIP, TRANSFORMER, VAE)


@pytest.mark.parametrize("text", ["encoder=x", "encoder=-1", "encoder=2,encoder=1", "encoder=1025", "encoder=1.5"])
def test_malformed_worker_counts_raise_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--workers .* is not ROLE=N; name each role once, with N at most 1024"):
        parse_workers(text)


@pytest.mark.parametrize("text", ["", ","])
def test_empty_workers_option_raises_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="use auto, none, split, or a plan like all=2"):
        parse_workers(text)


def test_workers_with_model_swapping_are_spread_over_devices() -> None:
    needs = {"encoder": (replace(T5, models=("one", "two")),), "denoiser": (replace(TRANSFORMER, models=("two",)),)}
    mapped = {role: tuple(replace(part, mapped=True) for part in parts) for role, parts in needs.items()}
    want = WorkerPlan({"all": 3}, max_loaded_models="1")
    placed = place_workers(mapped, want, gpus(80, 300))
    assert seats(placed) == [("all", "cuda:0"), ("all", "cuda:1"), ("all", "cuda:0")]
    two = place_workers(mapped, replace(want, counts={"all": 2}), (Device(CPU, 90 * GIB),))
    assert taken_bytes(two, want)[CPU] == 2 * (PROCESS + 34 * GIB), "each may have another model loaded"


@pytest.mark.parametrize("want", [WorkerPlan({"sculptor": 1}), WorkerPlan(place={"sculptor": (CPU,)})])
def test_unknown_role_raises_error_listing_known_roles(want: WorkerPlan) -> None:
    with pytest.raises(ConfigError, match="the role sculptor: roles are encoder, denoiser, decoder, and all"):
        place_workers(NEEDS, want, (HOST,))


def test_role_without_a_named_device_may_run_on_every_gpu() -> None:
    assert devices_of("encoder", wanted(), gpus(1, 1)) == ("cuda:0", "cuda:1")
    assert devices_of("encoder", wanted(), (HOST,)) == (CPU,)
    assert devices_of("encoder", wanted(device=CPU), gpus(1)) == (CPU,)


PARTS = st.builds(
    ComponentMemory,
    st.sampled_from(["transformer", "text_encoder", "vae"]),
    st.just("float32"),
    st.integers(1, 90 * GIB),
)
NAMES = st.sampled_from([CPU, "cuda:0", "cuda:1"])


@given(
    needs=st.fixed_dictionaries({role: st.lists(PARTS, max_size=3).map(tuple) for role in ROLES}),
    counts=st.fixed_dictionaries({role: st.integers(0, 3) for role in ROLES}),
    named=st.dictionaries(st.sampled_from(list(ROLES)), st.lists(NAMES, min_size=1, max_size=3).map(tuple)),
    free=st.lists(st.integers(0, 100 * GIB), min_size=3, max_size=3),
    offload=st.sampled_from(["none", "model", "sequential"]),
)
def test_placement_fits_memory_and_follows_counts_and_places(
    needs: dict[str, tuple[ComponentMemory, ...]],
    counts: dict[str, int],
    named: dict[str, tuple[str, ...]],
    free: list[int],
    offload: str,
) -> None:
    devices = tuple(map(Device, [CPU, "cuda:0", "cuda:1"], free))
    compute = ComputeOptions(offload=offload)
    want = WorkerPlan(counts, named, compute, GIB, first=frozenset({"denoiser"}))
    assume(any(counts.values()))
    try:
        placed = place_workers(needs, want, devices)
    except ConfigError as error:
        if "do not fit" in str(error):
            assert_sums_are_right(str(error), devices)
        return
    takes = taken_bytes(placed, want)
    assert all(takes[device.name] <= device.free for device in devices)
    for role, count in counts.items():
        mine = [worker.device for worker in placed if worker.role in (role, "all")]
        together = any(worker.role == "all" for worker in placed)
        expected = max(count, len(named.get(role, ())))
        assert len(mine) == expected or (together and 0 < len(mine) <= expected)
        assert set(mine) <= set(named.get(role, mine))
        held = [worker.parts for worker in placed if worker.role == role]
        assert all(parts == needs[role] for parts in held)


def assert_sums_are_right(text: str, devices: tuple[Device, ...]) -> None:
    """Each sum in a refusal is that of its shares, up to rounding, and is more than what is free."""
    short = [part for part in text.split(": ", 1)[1].split("; ") if "would need" in part]
    assert short
    for sentence in short:
        name, rest = sentence.split(" would need ")
        total, shares = rest.split(" (", 1)[0], rest.split("(", 1)[1].split(")")[0]
        parts = [share.split(" ", 1)[1] for share in shares.split(" + ")]
        (device,) = (device for device in devices if device.name == name)
        slack = GIB // 10 * (len(parts) + 1)
        assert abs(sum(map(in_bytes, parts)) - in_bytes(total)) <= slack
        assert in_bytes(total) + GIB // 10 >= device.free


def in_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB, "TiB": 1 << 40}[unit]
