"""Pipelines are refused with a reason, and compiled for one request with a stage for each picture."""

import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from msgspec import structs

from tests.core.graphs import pipelines
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import ConfigError, ProtocolError
from unfuse.core.modalities import OutputSize, Work, Workload
from unfuse.core.plan import (
    ExecutionPlan,
    Params,
    Pipeline,
    StageSelector,
    StageSpec,
    compile_plan,
    pool_name,
    prefix_key,
    roles_of,
    slots_of,
)
from unfuse.core.vision import MediaItem


def stage(name: str, inputs: str = "", outputs: str = "", per_sample: bool = False, kind: str = "denoise") -> StageSpec:
    return StageSpec(name, kind, (name,), tuple(inputs.split()), tuple(outputs.split()), per_sample)


PICTURE = Pipeline(
    (
        stage("vae_decode", "latents", per_sample=True),
        stage("text_encode", outputs="embedding mask"),
        stage("image_encode", outputs="pixels"),
        stage("denoise", "embedding mask pixels", "latents", per_sample=True),
    )
)


@pytest.mark.parametrize(
    "stages, reason",
    [
        ([stage("a", outputs="x"), stage("a", "x")], "two stages of the pipeline have the same name"),
        ([stage("a", outputs="x"), stage("b", outputs="x"), stage("c", "x")], "make the same output"),
        ([stage("a", outputs="x x"), stage("c", "x")], "make the same output"),
        ([stage("a", outputs="x"), stage("b", "x y z")], "no stage of the pipeline makes y, z"),
        ([stage("a", "y", "x"), stage("b", "x", "y"), stage("c", "y")], "form a cycle: "),
        ([stage("a", "x", "x"), stage("c", "x")], "form a cycle: a → a"),
        ([stage("a", outputs="x", per_sample=True), stage("b", "x")], "stage b runs once per request, but an input"),
        ([stage("a", outputs="x")], "none writes results"),
        ([], "none writes results"),
        ([stage("a.0")], "cannot have a dot"),
        (
            [stage("a", outputs="x y"), structs.replace(stage("b", "x"), extends_prefix_of="y")],
            "stage b extends y, which is not one of its inputs",
        ),
    ],
)
def test_invalid_pipeline_raises_config_error(stages: list[StageSpec], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Pipeline(tuple(stages)).validate()


def test_valid_pipeline_is_accepted() -> None:
    PICTURE.validate()
    assert PICTURE.producers()["mask"].name == "text_encode"


class TestCompiling:
    def plan(self, samples: int = 2, width: int = 64):  # type: ignore[no-untyped-def]
        pools = {spec.name: f"pool of {spec.name}" for spec in PICTURE.stages}
        return compile_plan(PICTURE, pools, {"width": width}, [{"seed": 7 + n} for n in range(samples)])

    def test_per_sample_stages_are_compiled_once_per_result(self) -> None:
        plan = self.plan()
        assert {one.name: one.after for one in plan.stages} == {
            "text_encode": (),
            "image_encode": (),
            "denoise.0": ("text_encode", "image_encode"),
            "denoise.1": ("text_encode", "image_encode"),
            "vae_decode.0": ("denoise.0",),
            "vae_decode.1": ("denoise.1",),
        }
        assert [plan.stage(f"denoise.{n}").params for n in (0, 1)] == [{"seed": 7}, {"seed": 8}]
        assert plan.stage("text_encode").params == {}

    def test_planned_stages_have_their_pool_and_final_flag(self) -> None:
        plan = self.plan()
        assert plan.stage("denoise.1").pool == "pool of denoise"
        assert [one.name for one in plan.stages if one.final] == ["vae_decode.0", "vae_decode.1"]

    def test_consumers_are_the_stages_that_read_the_output(self) -> None:
        plan = self.plan()
        assert [one.name for one in plan.consumers("text_encode")] == ["denoise.0", "denoise.1"]
        assert plan.consumers("vae_decode.0") == ()
        with pytest.raises(KeyError):
            plan.stage("denoise")

    @pytest.mark.slow
    def test_stage_order_does_not_depend_on_the_hash_seed(self) -> None:
        """Two schedulers with other hash seeds compile one request to the same order of stages."""
        code = (
            "from unfuse.core.plan import Pipeline, StageSpec as S, compile_plan as c\n"
            "stages = [S('x', 'k', (), tuple('dcba')), *(S(n.upper(), 'k', (), (), (n,)) for n in 'abcd')]\n"
            "print([s.name for s in c(Pipeline(tuple(stages)), {s.name: 'p' for s in stages}, {}, []).stages])"
        )
        orders = {
            subprocess.run(
                [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
            ).stdout
            for seed in ("1", "2", "3", "4")
        }
        assert len(orders) == 1


class TestCacheKeys:
    PIPELINE = Pipeline(
        (
            msgspec.structs.replace(stage("text", outputs="x"), depends_on_params=("prompt", "scale")),
            msgspec.structs.replace(stage("picture", outputs="y", per_sample=True), depends_on_params=("seed",)),
            stage("other", outputs="z"),
            msgspec.structs.replace(stage("denoise", "x", "latents", per_sample=True), depends_on_params=("prompt",)),
            stage("decode", "latents y z", per_sample=True),
        )
    )
    PARAMS: Params = {"prompt": "p", "scale": 1.0, "size": 64}

    def keys(
        self, params: Params = PARAMS, shared_by: Any = ("tenant", "exact"), pool: str = "pool", samples: int = 2
    ) -> dict[str, str]:
        pools = {spec.name: f"{pool} of {spec.name}" for spec in self.PIPELINE.stages}
        plan = compile_plan(self.PIPELINE, pools, params, [{"seed": 7 + n} for n in range(samples)], shared_by)
        return {one.name: one.cache_key for one in plan.stages if one.cache_key}

    def test_only_parameter_driven_stages_without_inputs_have_cache_keys(self) -> None:
        keys = self.keys()
        assert set(keys) == {"text", "picture.0", "picture.1"}
        assert {len(key) for key in keys.values()} == {32}
        assert len(set(keys.values())) == 3

    def test_cache_key_ignores_parameters_that_the_stage_does_not_read(self) -> None:
        assert self.keys() == self.keys({**self.PARAMS, "size": 128})
        assert self.keys()["picture.1"] == self.keys(samples=3)["picture.1"]

    @pytest.mark.parametrize(
        "other",
        [
            {"params": {**PARAMS, "prompt": "q"}},
            {"params": {**PARAMS, "scale": 2.0}},
            {"params": {**PARAMS, "scale": True}},
            {"params": {**PARAMS, "scale": None}},
            {"params": {**PARAMS, "prompt": "", "scale": "p"}},
            {"shared_by": ("another", "exact")},
            {"shared_by": ("tenant", "batched")},
            {"shared_by": ("tenantexact",)},
            {"pool": "another"},
        ],
    )
    def test_cache_key_depends_on_every_input_of_the_stage(self, other: dict[str, Any]) -> None:
        assert self.keys()["text"] != self.keys(**other)["text"]

    def test_request_without_sharing_has_no_cache_keys(self) -> None:
        assert self.keys(shared_by=None) == {}

    def test_cache_key_of_invalid_unicode_raises_protocol_error(self) -> None:
        with pytest.raises(ProtocolError):
            self.keys({"prompt": "\ud800"})


class TestExtending:
    STAGES = Pipeline(
        (
            structs.replace(stage("prefill", outputs="kv"), prefix_cached=True),
            structs.replace(stage("decode", "kv", per_sample=True), extends_prefix_of="kv"),
        )
    )
    POOLS = {"prefill": "prefill:1@aa", "decode": "decode:1@aa"}

    def plan(self, shared_by: tuple[str, ...] | None = ("tenant",), **pools: str) -> ExecutionPlan:
        return compile_plan(self.STAGES, self.POOLS | pools, {}, [{"seed": 1}, {"seed": 2}], shared_by, ["a", "ab"])

    def test_decode_extends_prefixes_under_the_keys_of_prefill(self) -> None:
        plan = self.plan()
        decodes = [plan.stage(f"decode.{index}") for index in (0, 1)]
        for decode in decodes:
            keys = tuple(prefix_key(decode.extends_prefix_of, digest) for digest in ("a", "ab"))
            assert keys == plan.stage("prefill").prefixes
            assert decode.prefixes == ()
        assert plan.stage("prefill").extends_prefix_of == ""

    def test_prefix_keys_differ_between_tenants_and_pools(self) -> None:
        others = [self.plan(("another",)), self.plan(prefill="prefill:2@aa")]
        assert len({plan.stage("decode.0").extends_prefix_of for plan in [self.plan(), *others]}) == 3

    @pytest.mark.parametrize(
        "other", [{"shared_by": None}, {"decode": "decode:1@bb"}, {"decode": "decode:1"}, {"prefill": "prefill:1"}]
    )
    def test_prefix_is_not_extended_without_sharing_or_equal_numerics(self, other: dict[str, Any]) -> None:
        assert self.plan(**other).stage("decode.0").extends_prefix_of == ""

    @pytest.mark.parametrize("moved", ["prefill", "decode.0"])
    def test_prefix_is_not_extended_after_moving_to_another_pool(self, moved: str) -> None:
        plan = self.plan().with_pools({moved: "another:1@bb"})
        assert (plan.stage("decode.0").extends_prefix_of, plan.stage(moved).pool) == ("", "another:1@bb")
        assert bool(plan.stage("decode.1").extends_prefix_of) == (moved == "decode.0")
        assert self.plan().with_pools({moved: self.POOLS[moved.partition(".")[0]]}) == self.plan()


@settings(deadline=None)
@given(pipelines(), st.integers(1, 4))
def test_any_valid_pipeline_compiles_in_dependency_order(pipeline: Pipeline, samples: int) -> None:
    """Stages come after what they read, once a request or once a picture, and read their own picture's values."""
    pipeline.validate()
    pools = {spec.name: spec.name for spec in pipeline.stages}
    plan = compile_plan(pipeline, pools, {}, [{"index": n} for n in range(samples)])
    places = {one.name: place for place, one in enumerate(plan.stages)}
    specs = {spec.name: spec for spec in pipeline.stages}
    assert len(places) == len(plan.stages) == sum(samples if spec.per_sample else 1 for spec in pipeline.stages)
    for one in plan.stages:
        spec = specs[one.pool]
        assert one.final == (not spec.outputs)
        assert all(places[before] < places[one.name] for before in one.after)
        assert {before.partition(".")[0] for before in one.after} == {
            pipeline.producers()[value].name for value in spec.inputs
        }
        indices = {before.partition(".")[2] for before in one.after} - {""}
        assert indices <= {one.name.partition(".")[2]}
        assert one.params == ({"index": int(one.name.partition(".")[2])} if spec.per_sample else {})


@settings(deadline=None)
@given(pipelines(), st.data())
def test_pipeline_with_a_missing_output_raises_config_error(pipeline: Pipeline, data: st.DataObject) -> None:
    needed = sorted({value for spec in pipeline.stages for value in spec.inputs})
    if not needed:
        return
    gone = data.draw(st.sampled_from(needed))
    stages = [
        msgspec.structs.replace(spec, outputs=tuple(value for value in spec.outputs if value != gone))
        for spec in pipeline.stages
    ]
    with pytest.raises(ConfigError, match=f"makes {gone}"):
        Pipeline(tuple(stages)).validate()


def test_optional_stage_is_omitted_without_its_parameter() -> None:
    stages = (
        StageSpec("look", "look", ("vae",), outputs=("seen",), depends_on_params=("image",), only_with="image"),
        StageSpec("draw", "draw", ("vae",), inputs=("seen",), per_sample=True),
    )
    pools = {"look": "look:1", "draw": "draw:1"}

    plans = [
        compile_plan(Pipeline(stages), pools, params, [{}, {}]) for params in ({"image": "a"}, {"image": None}, {})
    ]

    names = [[(stage.name, stage.after) for stage in plan.stages] for plan in plans]
    assert names[0] == [("look", ()), ("draw.0", ("look",)), ("draw.1", ("look",))]
    assert names[1] == names[2] == [("draw.0", ()), ("draw.1", ())]


def test_output_size_grows_with_pixels_and_frame_groups() -> None:
    room = OutputSize(fixed=100, per_unit=0.5, group=4)
    assert room.bytes({"width": 8, "height": 4}) == 116
    assert room.bytes({"width": 8, "height": 4, "num_frames": 1}) == 116
    assert room.bytes({"width": 8, "height": 4, "num_frames": 9}) == 148
    assert OutputSize().bytes({"width": 8, "height": 4}) == 0


def test_pool_id_has_kind_class_weights_and_dtype() -> None:
    weights, dtypes = {"denoise": "0123456789abcdef"}, {"denoise": "bfloat16"}
    assert pool_name(stage("denoise"), weights, dtypes, {"denoise": "Dit"}) == "denoise:Dit:0123456789ab:bfloat16"
    assert pool_name(stage("denoise"), weights, dtypes, {}) == "denoise::0123456789ab:bfloat16"


def test_roles_of_parses_one_or_several_or_all_roles() -> None:
    assert roles_of("all") is roles_of("encoder+all") is None
    assert roles_of("denoiser") == {"denoiser"}
    assert roles_of("encoder + decoder") == {"encoder", "decoder"}
    for text in ("", "encoder+", "+"):
        with pytest.raises(ConfigError, match="is not a role: write one such as denoiser, several as encoder.decoder"):
            roles_of(text)


def test_slots_of_a_worker_are_the_minimum_of_its_roles() -> None:
    stages = [stage(name) for name in ("a", "b", "c")]
    stages = [structs.replace(one, role=one.name, slots=slots) for one, slots in zip(stages, (4, 2, 7), strict=True)]
    chosen = [
        [one for one in stages if StageSelector(roles_of(text)).selects(one)] for text in ("a", "a+c", "all", "nobody")
    ]
    assert [slots_of(taken) for taken in chosen] == [4, 4, 2, 1]


@pytest.mark.parametrize(
    ("workload", "params", "work"),
    [
        (Workload(), {"width": 64, "height": 32}, (1.0, 2048.0)),
        (Workload(), {"width": 64, "height": 32, "num_frames": 5, "num_inference_steps": 9}, (1.0, 10240.0)),
        (Workload("num_inference_steps", (), ()), {"num_inference_steps": 9}, (9.0, 1.0)),
        (Workload("", ("a", "b"), ("c",)), {"b": 2.0, "c": 7}, (1.0, 7.0)),
        (Workload("", ("a", "b"), ("c",)), {"b": 2.0, "c": 7, "negative_prompt": ""}, (2.0, 7.0)),
        (Workload("", ("a", "b"), ("c",)), {"a": 1.0, "b": 2.0, "c": 7, "negative_prompt": ""}, (1.0, 7.0)),
        (Workload("n", ("a",), ("c",)), {"n": 3, "a": 4, "c": 7, "negative_prompt": "x"}, (6.0, 7.0)),
        (Workload("n", (), ("c",), part="s"), {"n": 8, "c": 7, "s": 0.25}, (2.0, 7.0)),
        (Workload("n", (), ("c",), part="s"), {"n": 8, "c": 7, "s": None}, (8.0, 7.0)),
    ],
)
def test_workload_is_computed_from_request_parameters(workload: Workload, params: Params, work: Work) -> None:
    assert workload.of(params) == work


def test_planned_stage_has_its_workload() -> None:
    made = StageSpec("a", "a", ("w",), work=Workload("n", size=("width",)))
    plan = compile_plan(Pipeline((made,)), {"a": "pool"}, {"n": 4, "width": 8}, [{}])
    assert plan.stages[0].work == (4.0, 8.0)


class TestStagesForEachEntry:
    """Stages that run for each entry of a list, as pictures that a prompt shows are encoded each on its own."""

    A, B = (
        MediaItem(name, f"shown-{name}", frames=1, rows=1, columns=1, tokens=count)
        for name, count in (("a", 4), ("b", 9))
    )
    LANGUAGE = Pipeline(
        (
            StageSpec(
                "encode",
                "vision_encode",
                ("model",),
                (),
                ("seen",),
                per_item="shown",
                depends_on_params=("content_hash",),
                output_size=OutputSize(10, 2, 1, ("tokens",)),
                work=Workload(size=("tokens",)),
            ),
            stage("prefill", "seen", "kv"),
            stage("decode", "seen kv", per_sample=True),
        )
    )

    def plan(self, *shown: MediaItem) -> Any:
        self.LANGUAGE.validate()
        pools = {spec.name: spec.name for spec in self.LANGUAGE.stages}
        samples: list[Params] = [{"index": 0}, {"index": 1}]
        return compile_plan(self.LANGUAGE, pools, {}, samples, ("tenant",), derived=DerivedFacts(media=shown))

    def test_equal_media_items_are_compiled_to_one_stage(self) -> None:
        plan = self.plan(self.A, self.B, self.A)
        assert {one.name: one.after for one in plan.stages} == {
            "encode.0": (),
            "encode.1": (),
            "prefill": ("encode.0", "encode.1"),
            "decode.0": ("encode.0", "encode.1", "prefill"),
            "decode.1": ("encode.0", "encode.1", "prefill"),
        }
        first, second = plan.stages[:2]
        assert (first.derived, first.output_size, first.work) == (DerivedFacts(media=(self.A,)), 18, (1.0, 4.0))
        assert (second.output_size, second.work) == (28, (1.0, 9.0))

    def test_cache_key_of_a_media_item_does_not_depend_on_its_position(self) -> None:
        one, other = self.plan(self.A, self.B), self.plan(self.B)
        assert one.stage("encode.1").cache_key == other.stage("encode.0").cache_key != one.stage("encode.0").cache_key

    def test_per_item_stage_is_omitted_without_media_items(self) -> None:
        assert [one.name for one in self.plan().stages] == ["prefill", "decode.0", "decode.1"]
        assert self.plan().stage("prefill").after == ()
