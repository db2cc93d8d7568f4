"""Rates of videos: those of diffusers' examples, or of a model's makers."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools.tiny_whole import build
from unfuse.models import read_model_spec, undivided_family
from unfuse.models.declared import declared_pipeline, frame_rate

MAKERS = {
    "HunyuanSkyreelsImageToVideoPipeline": 24,
    "HunyuanVideo15Pipeline": 24,
    "HunyuanVideoImageToVideoPipeline": 24,
    "HunyuanVideoPipeline": 24,
    "LTXConditionPipeline": 25,
    "LTXImageToVideoPipeline": 25,
    "LTXPipeline": 25,
}
"""Where the makers, or the call itself, say another rate than the example."""

SILENT = frozenset({"LTX2LatentUpsamplePipeline", "LTX2VideoDiffusionDecodePipeline"})


def video_pipelines() -> dict[str, str]:
    """The source of each pipeline of the installed diffusers that returns videos, by its class."""
    spec = find_spec("diffusers")
    assert spec is not None and spec.origin is not None
    found = {}
    for file in Path(spec.origin).parent.joinpath("pipelines").rglob("pipeline_*.py"):
        source = file.read_text()
        names = [node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
        for name in names:
            said = declared_pipeline(name) if name.endswith("Pipeline") else None
            if said is not None and said.modality == "video":
                found[name] = source
    return found


@pytest.mark.nightly
@pytest.mark.slow
def test_default_frame_rates_match_diffusers_examples_or_model_makers() -> None:
    found = video_pipelines()
    assert len(found) > 50

    for name, source in found.items():
        rates = {int(rate) for rate in re.findall(r"export_to_video\([^)]*fps=(\d+)", source)}
        wanted = {MAKERS[name]} if name in MAKERS else rates
        known = frame_rate(name, {}, {})
        assert known is not None or name in SILENT, f"no rate is known of {name}"
        assert not wanted or {known} == wanted, f"{name} plays at {known}, and its example at {wanted}"


@pytest.mark.parametrize(
    ("name", "index", "transformer", "rate"),
    [
        ("MochiPipeline", {}, {}, 30),
        ("AnimateDiffSDXLPipeline", {}, {}, 8),
        ("LattePipeline", {}, {}, 8),
        ("CogVideoXPipeline", {}, {"patch_size_t": None}, 8),
        ("CogVideoXPipeline", {}, {"patch_size_t": 2}, 16),
        ("WanPipeline", {}, {}, 16),
        ("WanPipeline", {"expand_timesteps": True}, {}, 24),
        ("OwnPipeline", {}, {}, None),
    ],
)
def test_frame_rate_depends_on_pipeline_class_and_model_config(
    name: str, index: dict[str, object], transformer: dict[str, object], rate: int | None
) -> None:
    assert frame_rate(name, index, transformer) == rate


@pytest.mark.slow
def test_unknown_frame_rate_is_reported_as_assumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build("cogvideox", tmp_path / "m", serving=False)
    known = read_model_spec("m", folder)
    monkeypatch.setattr(undivided_family, "frame_rate", lambda *_: None)
    unknown = read_model_spec("m", folder)
    (folder / "serving.json").write_text('{"defaults": {"fps": 12}}')
    told = read_model_spec("m", folder)

    assert [card.defaults["fps"] for card in (known, unknown, told)] == [8, 16, 12]
    assert ["is assumed" in card.undivided_reason for card in (known, unknown, told)] == [False, True, False]
