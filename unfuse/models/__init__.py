"""Model families. No other folder knows a family's name; torch is imported only when a stage is loaded."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from unfuse.core.errors import ConfigError
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import StageSelector
from unfuse.core.registry import resolve
from unfuse.models.base import Family
from unfuse.models.declared import declared
from unfuse.models.undivided_family import FAMILY as WHOLE
from unfuse.weights.gguf_model import files_of
from unfuse.weights.hub import Tell
from unfuse.weights.source import pipeline_class, resolve_source

__all__ = ["Family", "card_of", "fetch", "find", "resolve_source", "served_classes"]

FAMILIES = {
    "Flux2KleinPipeline": "unfuse.models.modular:KLEIN",
    "FluxKontextPipeline": "unfuse.models.flux:KONTEXT",
    "FluxPipeline": "unfuse.models.flux:FAMILY",
    "HunyuanVideoPipeline": "unfuse.models.hunyuan_video:FAMILY",
    "Krea2Pipeline": "unfuse.models.modular:KREA",
    "LTXPipeline": "unfuse.models.ltx:FAMILY",
    "LlamaForCausalLM": "unfuse.models.language:FAMILY",
    "Qwen2ForCausalLM": "unfuse.models.language:FAMILY",
    "Qwen2_5_VLForConditionalGeneration": "unfuse.models.language:VISION_LANGUAGE",
    "Qwen3ForCausalLM": "unfuse.models.language:FAMILY",
    "Qwen3MoeForCausalLM": "unfuse.models.language:FAMILY",
    "Qwen3VLForConditionalGeneration": "unfuse.models.language:VISION_LANGUAGE",
    "Qwen3VLMoeForConditionalGeneration": "unfuse.models.language:VISION_LANGUAGE",
    "QwenImagePipeline": "unfuse.models.qwen_image:FAMILY",
    "StableDiffusion3Pipeline": "unfuse.models.sd3:FAMILY",
    "StableDiffusionXLPipeline": "unfuse.models.sdxl:FAMILY",
    "WanImageToVideoPipeline": "unfuse.models.wan:IMAGE_TO_VIDEO",
    "WanPipeline": "unfuse.models.wan:FAMILY",
    "ZImagePipeline": "unfuse.models.z_image:FAMILY",
}
"""Families by the class that model_index.json names, or config.json of a model that is no pipeline."""

OUTSIDE = "unfuse.families"  # entry points of other packages' families, by pipeline class; they cannot replace ours


def served_classes() -> tuple[str, ...]:
    """The pipeline classes that can be served."""
    return tuple(sorted(FAMILIES))


def find(source: str | Path) -> Family:
    """The family of a model: of a folder or a GGUF file by what that says, of anything else by name.

    A folder of another pipeline is served undivided. Raises ConfigError when it holds no model, or one that is not
    served.
    """
    folder = files_of(Path(source)) if source and Path(source).exists() else None
    found = folder.kind if folder else pipeline_class(str(source))
    outside = entry_points(group=OUTSIDE) if found not in FAMILIES else ()
    families = {point.name: point.value for point in outside} | FAMILIES
    if found not in families and folder and not folder.is_whole and declared(found):
        return WHOLE
    if found not in families:
        raise ConfigError(
            f"model {source} is a {found[:80]}, which is not served; served are {', '.join(sorted(families))}, and "
            "undivided any other pipeline of the installed diffusers"
        )
    family: Family = resolve(families, found, "model family")
    return family if folder is None or family.takes(folder) else WHOLE


def fetch(
    name: str,
    choice: StageSelector,
    source: str = "",
    revision: str = "",
    dtype: str = "auto",
    tell: Tell | None = None,
) -> tuple[ModelSpec, Path]:
    """The card and the folder of a model, with the weights of the stages that are chosen; others are not downloaded.

    `source` is what `resolve_source` finds it by, if that is not its name. Raises ConfigError.
    """
    folder = resolve_source(source or name, revision or None, ())
    card = card_of(name, folder, dtype)
    stages = [stage for stage in card.pipeline.stages if choice.takes(stage)]
    resolve_source(card.source, None, {component for stage in stages for component in stage.components}, tell)
    return card, folder


def card_of(name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
    """The card of the model in a folder. Raises ConfigError for one that is not served, or whose stages do not join."""
    card = find(folder).card(name, folder, dtype)
    try:
        card.pipeline.validate()
    except ConfigError as error:
        raise ConfigError(f"model {name} of family {card.family}: {error}") from error
    return card
