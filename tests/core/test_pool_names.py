"""Pools have names that people read: from content only, and valid wherever Kubernetes takes a name."""

import re

import pytest
from hypothesis import example, given, strategies as st

from unfuse.core.plan import StageSpec, declared_pool, numerics_of, pool_name, pool_with_numerics, readable_pool

LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
HASH = "856e0715"

KINDS = st.from_regex(r"[a-z][a-z0-9_.]{0,40}", fullmatch=True)
CLASSES = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,80}", fullmatch=True) | st.just("")
HASHES = st.from_regex(r"[0-9a-f]{12}", fullmatch=True)
DTYPES = st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3fn", "int8wo", "Q4_K_M"])
NUMERICS = st.dictionaries(st.sampled_from(["torch", "device", "batching"]), st.text(max_size=5))
IDS = st.builds(
    lambda kind, name, weights, dtype, numerics: pool_with_numerics(f"{kind}:{name}:{weights}:{dtype}", numerics),
    KINDS,
    CLASSES,
    HASHES,
    DTYPES,
    NUMERICS,
)


def named(name: str, kind: str = "denoise", dtype: str = "bfloat16") -> str:
    """The name of a pool of that class, without its hash."""
    return readable_pool(f"{kind}:{name}:1f2e3d4c5b6a:{dtype}@0a1b2c3d").rpartition("-")[0]


def test_pool_name_has_stage_class_dtype_and_8_hash_digits() -> None:
    pool = "denoise:FluxTransformer2DModel:1f2e3d4c5b6a:bfloat16@0a1b2c3d"
    assert readable_pool(pool) == f"denoise-flux-transformer-2d-bf16-{HASH}"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("FluxTransformer2DModel", "flux-transformer-2d"),
        ("T5EncoderModel", "t5-encoder"),
        ("UMT5EncoderModel", "umt5-encoder"),
        ("AutoencoderKL", "autoencoder-kl"),
        ("AutoencoderKLWan", "autoencoder-kl-wan"),
        ("SD3Transformer2DModel", "sd3-transformer-2d"),
        ("HunyuanVideoTransformer3DModel", "hunyuan-video-transformer-3d"),
        ("CLIPTextModelWithProjection", "clip-text-model-with-projection"),
        ("Qwen2ForCausalLM", "qwen2-for-causal-lm"),
        ("Qwen2_5_VLForConditionalGeneration", "qwen2-5-vl-for-conditional-generation"),
        ("UNet2DConditionModel", "unet-2d-condition"),
        ("StableDiffusionXLPipeline", "stable-diffusion-xl-pipeline"),
    ],
)
def test_component_class_is_written_in_words_without_model_suffix(name: str, words: str) -> None:
    assert named(name) == f"denoise-{words}-bf16"


@pytest.mark.parametrize(
    ("dtype", "short"),
    [
        ("float32", "f32"),
        ("float16", "f16"),
        ("bfloat16", "bf16"),
        ("float8_e4m3fn", "f8-e4m3fn"),
        ("int8wo", "int8wo"),
    ],
)
def test_float_dtypes_are_abbreviated_in_pool_names(dtype: str, short: str) -> None:
    assert named("AutoencoderKL", dtype=dtype) == f"denoise-autoencoder-kl-{short}"


def test_stage_kind_is_converted_to_dns_label_characters() -> None:
    assert named("T5EncoderModel", "text_encode_2") == "text-encode-2-t5-encoder-bf16"
    assert named("T5EncoderModel", "Mirror.each_") == "mirror-each-t5-encoder-bf16"


def test_only_the_class_is_truncated_in_a_too_long_pool_name() -> None:
    name = readable_pool(f"text_encode_2:Very{'long' * 20}:1f2e3d4c5b6a:bfloat16")
    assert (name[:23], name[-14:-8], len(name)) == ("text-encode-2-verylongl", "-bf16-", 63)


def test_pool_id_without_a_class_has_a_readable_name() -> None:
    """Given a model of somebody else's family, whose spec says no classes, then its pools are named without one."""
    assert named("") == "denoise-bf16"
    assert readable_pool("denoise:1f2e3d4c5b6a:bfloat16").startswith("denoise-bf16-")
    assert readable_pool("p").startswith("p-")


@given(IDS)
@example("denoise:FluxTransformer2DModel:1f2e3d4c5b6a:bfloat16@0a1b2c3d")
def test_pool_name_is_a_stable_dns_label_with_a_hash_suffix(pool: str) -> None:
    name = readable_pool(pool)
    assert LABEL.fullmatch(name) and len(name) <= 63
    assert name == readable_pool(pool)
    assert re.search(r"(^|-)[0-9a-f]{8}$", name)


@given(st.text(max_size=200))
def test_pool_name_of_any_text_is_a_dns_label(pool: str) -> None:
    assert LABEL.fullmatch(name := readable_pool(pool)) and len(name) <= 63


@given(IDS, IDS)
def test_different_pool_ids_have_different_names(one: str, other: str) -> None:
    assert (readable_pool(one) == readable_pool(other)) == (one == other)


@given(KINDS, CLASSES, HASHES, DTYPES, NUMERICS)
def test_pool_name_hash_depends_on_weights_and_numerics(
    kind: str, name: str, weights: str, dtype: str, numerics: dict[str, str]
) -> None:
    spec = StageSpec("any", kind, ("part",))
    pool = pool_name(spec, {"part": weights}, {"part": dtype}, {"part": name})
    served, other = (
        pool_with_numerics(pool, numerics),
        pool_name(spec, {"part": weights[::-1]}, {"part": dtype}, {"part": name}),
    )
    assert declared_pool(served) == pool
    assert (readable_pool(served) == readable_pool(pool)) == (not numerics)
    assert (readable_pool(other) == readable_pool(pool)) == (weights == weights[::-1])
    assert numerics_of(served) == served[len(pool) + 1 :]
    assert readable_pool(served).rpartition("-")[0] == readable_pool(pool).rpartition("-")[0]


def test_separators_in_a_class_are_removed_from_the_pool_id() -> None:
    spec = StageSpec("any", "denoise", ("part",))
    pool = pool_name(spec, {"part": "1" * 20}, {"part": "float32"}, {"part": "a:b@c d"})
    assert pool == "denoise:abcd:111111111111:float32"
