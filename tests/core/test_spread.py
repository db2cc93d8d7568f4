"""What `--parallel` says, and what is refused before anything is loaded."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, strategies as st
from msgspec.structs import replace

from unfuse.core.compute_options import (
    MAX_RANKS,
    PARALLEL_KINDS,
    ParallelDegrees,
    choose_parallel,
    joined_by,
    parse_parallel,
    rank_devices,
    refuse,
    smaller_layouts,
    worker_parallelism,
)
from unfuse.core.errors import ConfigError
from unfuse.core.parameters import Workload
from unfuse.core.plan import StageSpec

WAYS = {"ulysses": 24, "ring": 0, "cfg": 2, "tensor": 24, "layers": 30, "tiles": 0, "shard": 0}
DENOISE = StageSpec("denoise", "denoise", (), role="denoiser", parallelism=WAYS)
DECODE = StageSpec("decode", "vae_decode", (), role="decoder")


@given(st.dictionaries(st.sampled_from(PARALLEL_KINDS), st.integers(2, 64), min_size=1))
def test_parallel_degrees_round_trip_in_any_order(degrees: dict[str, int]) -> None:
    """In any order: the kinds have one of their own, which says who is next to whom."""
    assume(ParallelDegrees(degrees).size <= MAX_RANKS)
    text = " + ".join(f"{kind} : {degree}" for kind, degree in degrees.items())
    spread = ParallelDegrees.parse(text)
    assert dict(spread.degrees) == degrees
    assert [*spread.degrees] == [kind for kind in PARALLEL_KINDS if kind in degrees]
    assert ParallelDegrees.parse(str(spread)) == spread


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ulysses", "needs a number of ranks from 2 to 64"),
        ("ulysses:1", "from 2 to 64"),
        ("ulysses:65", "from 2 to 64"),
        ("ulysses:two", "from 2 to 64"),
        ("ulysses:9+ring:8", "needs 72 ranks, but a worker has at most 64"),
        ("rings:2", f"is not KIND:N; kinds are {', '.join(PARALLEL_KINDS)}, each once"),
        ("cfg:2+cfg:2", "each once"),
        ("", "is not KIND:N"),
        ("ulysses:2+", "is not KIND:N"),
    ],
)
def test_invalid_parallel_degrees_raise_config_error_with_the_syntax(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ParallelDegrees.parse(text)


@pytest.mark.parametrize("text", ["ulysses:2", "=ulysses:2", "denoiser=", "denoiser=cfg:2,denoiser=ring:2"])
def test_parallel_option_accepts_each_role_once(text: str) -> None:
    with pytest.raises(ConfigError, match="is not ROLE=KIND:N, with each role at most once"):
        parse_parallel(text)


def test_worker_parallelism_is_that_of_its_roles() -> None:
    text = "denoiser=ulysses:2+cfg:2, decoder=ring:2"
    assert worker_parallelism("", None) == {}
    assert worker_parallelism(text, frozenset({"encoder"})) == {}
    assert str(worker_parallelism(text, frozenset({"encoder", "denoiser"}))["denoiser"]) == "cfg:2+ulysses:2"
    with pytest.raises(ConfigError, match=r"roles of a worker must have the same number of ranks, not \[2, 4\]"):
        worker_parallelism(text, None)


def test_prefill_and_decode_of_one_worker_need_equal_parallelism() -> None:
    """One word says it of both, and has them in one worker."""
    both = frozenset({"prefill", "decode"})
    found = worker_parallelism("language=tensor:2", both)
    assert {role: str(spread) for role, spread in found.items()} == dict.fromkeys(("prefill", "decode"), "tensor:2")
    assert joined_by("vision=tensor:2, language = tensor:2") == dict.fromkeys(both, "language")
    assert joined_by("prefill=tensor:2,decode=tensor:2") == joined_by("") == {}
    assert worker_parallelism("decode=tensor:2", frozenset({"prefill"})) == {}
    for roles in (both, None):
        with pytest.raises(ConfigError, match="share the model of a worker: set language=KIND:N for both"):
            worker_parallelism("decode=tensor:2", roles)
    with pytest.raises(ConfigError, match="each role at most once"):
        parse_parallel("language=tensor:2,decode=tensor:2")


@pytest.mark.parametrize(
    ("degrees", "says"),
    [
        ("turbo:2", "is not KIND:N"),
        ("ulysses:5", "ulysses:5 does not divide 24: use ulysses:4"),
        ("ulysses:7", "use ulysses:6"),
        ("ulysses:64", "use ulysses:24"),
        ("cfg:3", "cfg:3 does not divide 2: use cfg:2"),
        ("tensor:5", "tensor:5 does not divide 24: use tensor:4"),
        ("tensor:4+ulysses:4", "ulysses:4 does not divide 6: use ulysses:3"),
        ("layers:31", "layers:31 exceeds the number of blocks: use layers:30"),
        ("ulysses:4+shard:3", "shard:3 does not divide 4: use shard:2"),
        ("ulysses:3+shard:2", "shard:2 does not divide 3: use shard:3"),
        ("tensor:2+tiles:3", "tiles:3 does not divide 2: use tiles:2"),
        ("layers:2+shard:2", "layers and shard cannot be combined"),
    ],
)
def test_non_dividing_degree_error_names_the_nearest_valid_degree(degrees: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        refuse({"denoiser": ParallelDegrees.parse(degrees)}, [DENOISE])


def test_parallelism_unsupported_by_a_role_raises_config_error() -> None:
    refuse({"denoiser": ParallelDegrees.parse("ring:7+cfg:2+ulysses:3")}, [DENOISE, DECODE])
    with pytest.raises(ConfigError, match=r"decoder=ring:2: ring is not supported for this role; supported: none"):
        refuse({"decoder": ParallelDegrees.parse("ring:2")}, [DENOISE, DECODE])
    with pytest.raises(ConfigError, match="no stage has that role; roles are denoiser, decoder"):
        refuse({"painter": ParallelDegrees.parse("ring:2")}, [DENOISE, DECODE])


def test_degree_must_be_valid_for_every_stage_of_a_role() -> None:
    encoders = [StageSpec(str(n), "encode", (), role="encoder", parallelism={"tensor": n}) for n in (12, 64, 0)]
    refuse({"encoder": ParallelDegrees.parse("tensor:4")}, encoders)
    with pytest.raises(ConfigError, match="tensor:6 does not divide 4: use tensor:4"):
        refuse({"encoder": ParallelDegrees.parse("tensor:6")}, encoders)
    with pytest.raises(ConfigError, match="tensor is not supported for this role; supported: none"):
        refuse({"encoder": ParallelDegrees.parse("tensor:2")}, [*encoders, StageSpec("see", "see", (), role="encoder")])


def test_each_rank_has_a_device() -> None:
    two = worker_parallelism("denoiser=ulysses:2", None)
    assert rank_devices("cpu", {}) == ("cpu",)
    assert rank_devices("cpu", two) == rank_devices("cpu+cpu", two) == ("cpu", "cpu")
    assert rank_devices("auto", two) == ("auto", "auto")
    assert rank_devices("cuda:1+cuda:0", two) == ("cuda:1", "cuda:0")
    with pytest.raises(ConfigError, match="two ranks cannot use the same GPU"):
        rank_devices("cuda:0+cuda:0", two)
    with pytest.raises(ConfigError, match=r"two ranks cannot use the same GPU, and cuda:0 is named twice"):
        rank_devices("cuda+ cuda:0", two)
    for devices in ("cuda:0", "cpu+cpu+cpu"):
        with pytest.raises(ConfigError, match=r"such as cpu\+cpu or cuda:0\+cuda:1"):
            rank_devices(devices, two)
    with pytest.raises(ConfigError, match=r"here 1 \(--parallel: not set\)"):
        rank_devices("cpu+cpu", {})


def test_smaller_layouts_use_fewer_devices() -> None:
    four = {"denoiser": ParallelDegrees.parse("ulysses:2+cfg:2")}
    assert [*smaller_layouts("cuda:0+cuda:3+cuda:1+cuda:2", four)] == [
        ("cuda:0+cuda:3", "denoiser=cfg:2"),
        ("cuda:1+cuda:2", "denoiser=cfg:2"),
        ("cuda:0", ""),
        ("cuda:3", ""),
        ("cuda:1", ""),
        ("cuda:2", ""),
    ]
    assert [*smaller_layouts("cuda:0", {})] == []
    assert [*smaller_layouts("cpu+cpu+cpu", {"denoiser": ParallelDegrees.parse("ring:3")})] == [("cpu", "")]
    four = {"encoder": ParallelDegrees.parse("tensor:4+tiles:4")}
    assert [how for _, how in smaller_layouts("+".join(["cpu"] * 4), four)] == ["encoder=tensor:2+tiles:2", ""]


@given(st.lists(st.sampled_from(PARALLEL_KINDS), unique=True, min_size=1, max_size=4), st.data())
def test_every_smaller_layout_is_a_valid_configuration(kinds: list[str], data: st.DataObject) -> None:
    spread = ParallelDegrees({kind: data.draw(st.integers(2, 4)) for kind in kinds})
    assume(spread.size <= MAX_RANKS)
    before = spread.size
    for devices, parallel in smaller_layouts("+".join(f"cuda:{n}" for n in range(before)), {"denoiser": spread}):
        found = worker_parallelism(parallel, frozenset({"denoiser"}))
        assert rank_devices(devices, found) == tuple(devices.split("+"))
        assert len(rank_devices(devices, found)) <= before
        before = len(rank_devices(devices, found))
    assert before == 1


def test_shard_and_tiles_reuse_the_ranks_of_other_kinds() -> None:
    """They make ranks only where there is no other."""
    sizes = {"shard:3": (3, 3), "ulysses:4+shard:2": (4, 2), "cfg:2+layers:3": (6, 3), "ring:2": (2, 1)}
    sizes |= {"tiles:3": (3, 1), "tensor:4+tiles:2": (4, 1), "tiles:4+shard:2": (4, 2)}
    assert {text: (ParallelDegrees.parse(text).size, ParallelDegrees.parse(text).parts) for text in sizes} == sizes
    for text in ("shard:7", "layers:30", "layers:7+cfg:2", "cfg:2+ulysses:3+shard:6"):
        refuse({"denoiser": ParallelDegrees.parse(text)}, [DENOISE])


def test_layers_degree_is_limited_by_the_model_with_fewest_blocks() -> None:
    other = replace(DENOISE, parallelism={**WAYS, "layers": 20})
    refuse({"denoiser": ParallelDegrees.parse("layers:19")}, [DENOISE, other])
    with pytest.raises(ConfigError, match="layers:21 exceeds the number of blocks: use layers:20"):
        refuse({"denoiser": ParallelDegrees.parse("layers:21")}, [DENOISE, other])


@pytest.mark.parametrize("how", ["layers:2", "tensor:2"])
def test_layers_and_tensor_cannot_be_combined_with_offload(how: str) -> None:
    stage = replace(DENOISE, components=("transformer", "scheduler"))
    refuse({"denoiser": ParallelDegrees.parse("ulysses:2")}, [stage], "model")
    refuse({"denoiser": ParallelDegrees.parse(how)}, [stage], "model,transformer=none")
    refuse({"denoiser": ParallelDegrees.parse(how)}, [stage], "vae=model")
    advice = "leave one of them out, or add transformer=none to --offload"
    says = f"denoiser={how} cannot be combined with --offload model: {advice}"
    with pytest.raises(ConfigError, match=f"{says}, or use shard$"):
        refuse({"denoiser": ParallelDegrees.parse(how)}, [stage], "model")
    with pytest.raises(ConfigError, match=f"{says}$"):
        refuse({"denoiser": ParallelDegrees.parse(how)}, [replace(stage, parallelism={"tensor": 0})], "model")


@pytest.mark.parametrize("offload", ["model", "sequential", "transformer=model"])
def test_shards_can_be_offloaded(offload: str) -> None:
    stage = replace(DENOISE, components=("transformer", "scheduler"))
    for how in ("shard:2", "cfg:2+shard:2"):
        refuse({"denoiser": ParallelDegrees.parse(how)}, [stage], offload)


HEADS_40 = {"ulysses": 40, "ring": 0, "cfg": 2, "tensor": 40, "layers": 40, "shard": 0}
"""Those of a transformer with 40 heads, as of Wan 14B."""


def stage(role: str, spreads: dict[str, int], forwards: str = "") -> StageSpec:
    return StageSpec(role, role, (), role=role, parallelism=spreads, work=Workload(forwards))


@pytest.mark.parametrize(
    ("devices", "spreads", "chosen"),
    [
        (1, HEADS_40, ""),
        (0, HEADS_40, ""),
        (2, HEADS_40, "denoiser=ulysses:2"),
        (8, HEADS_40, "denoiser=ulysses:8"),
        (7, HEADS_40, "denoiser=ring:7"),
        (6, HEADS_40, "denoiser=ring:3+ulysses:2"),
        (8, WAYS | {"ulysses": 12}, "denoiser=tiles:8"),
        (8, {"tensor": 64}, "denoiser=tensor:8"),
        (7, {"tensor": 64}, "denoiser=tensor:4"),
        (8, {"cfg": 2}, "denoiser=cfg:2"),
        (8, {}, ""),
        (8, {"layers": 30, "shard": 0}, ""),
        (1000, HEADS_40, "denoiser=ring:8+ulysses:8"),
    ],
)
def test_auto_parallelism_uses_as_many_devices_as_a_stage_can_divide(
    devices: int, spreads: dict[str, int], chosen: str
) -> None:
    assert choose_parallel(devices, [stage("denoiser", spreads, "num_inference_steps")]) == chosen


def test_auto_parallelism_uses_the_rank_count_of_the_stepwise_role() -> None:
    """Given a decoder that would fill eight, a denoiser of 12 heads without ring, and an encoder that is whole."""
    denoiser = stage("denoiser", {"ulysses": 12}, "num_inference_steps")
    decoder, encoder = stage("decoder", {"tiles": 0}), stage("encoder", {})
    assert choose_parallel(8, [encoder, denoiser, decoder]) == "denoiser=ulysses:6,decoder=tiles:6"
    assert choose_parallel(8, [encoder, decoder]) == "decoder=tiles:8"
    assert choose_parallel(8, [encoder]) == ""


def test_auto_parallelism_divides_every_model_of_a_worker() -> None:
    two = [stage("denoiser", {"ulysses": heads}, "num_inference_steps") for heads in (24, 16)]
    assert choose_parallel(8, two) == "denoiser=ulysses:8"
    assert choose_parallel(8, [*two, stage("denoiser", {"ulysses": 12}, "num_inference_steps")]) == "denoiser=ulysses:4"


ALLOWED = st.dictionaries(st.sampled_from(PARALLEL_KINDS), st.integers(0, 64), max_size=4)


@given(st.integers(0, 70), ALLOWED, ALLOWED)
def test_auto_parallelism_is_valid_for_its_stages(devices: int, one: dict[str, int], other: dict[str, int]) -> None:
    stages = [stage("prefill", one), stage("decode", one, "expected_tokens"), stage("vision", other)]
    chosen = choose_parallel(devices, stages)
    refuse(parse_parallel(chosen), stages)
    sizes = {spread.size for spread in worker_parallelism(chosen, None).values()}
    assert len(sizes) <= 1 and max(sizes, default=1) <= max(devices, 1)


def test_parallel_auto_for_several_workers_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="--parallel auto configures one worker"):
        parse_parallel("auto")
