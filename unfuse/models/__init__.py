"""Model families.

No other folder knows a family's name; torch is imported only when a stage is loaded.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from unfuse.core.errors import ConfigError
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import StageSelector
from unfuse.core.registry import resolve
from unfuse.models.base import Family
from unfuse.models.declared import declared_pipeline
from unfuse.models.undivided_family import FAMILY as WHOLE
from unfuse.weights.gguf_model import open_files
from unfuse.weights.hub import ProgressCallback
from unfuse.weights.source import pipeline_class, resolve_source

__all__ = ["Family", "read_model_spec", "fetch", "find", "resolve_source", "served_classes"]

#: Families by the class in model_index.json, or in config.json for a model of transformers.
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

#: The entry points of other packages' families, by pipeline class. They cannot replace those above.
OUTSIDE = "unfuse.families"


def served_classes() -> tuple[str, ...]:
    """Return the pipeline and model classes that are served in stages."""
    return tuple(sorted(FAMILIES))


def find(source: str | Path) -> Family:
    """Return the family of a model, by its folder, GGUF file or name.

    A folder of another pipeline is served undivided. Raises ConfigError if there is no model, or it is not supported.
    """
    folder = open_files(Path(source)) if source and Path(source).exists() else None
    class_name = folder.kind if folder else pipeline_class(str(source))
    # Reading the entry points takes time, because it reads the metadata of every installed package.
    plugins = entry_points(group=OUTSIDE) if class_name not in FAMILIES else ()
    families = {plugin.name: plugin.value for plugin in plugins} | FAMILIES

    if class_name not in families and folder and not folder.is_transformers_model and declared_pipeline(class_name):
        return WHOLE
    if class_name not in families:
        raise ConfigError(
            f"model {source} is a {class_name[:80]}, which is not supported; supported: "
            f"{', '.join(sorted(families))}, and any other pipeline of the installed diffusers, undivided"
        )

    family: Family = resolve(families, class_name, "model family")
    return family if folder is None or family.supports(folder) else WHOLE


def fetch(
    name: str,
    choice: StageSelector,
    source: str = "",
    revision: str = "",
    dtype: str = "auto",
    on_progress: ProgressCallback | None = None,
) -> tuple[ModelSpec, Path]:
    """Download the weights of some stages of a model. Returns its spec and folder.

    `choice`: the stages whose weights are downloaded.
    `source`: the name by which `resolve_source` finds the model, if it is not `name`.
    `on_progress`: called with the download's progress.
    Raises ConfigError.
    """
    # Without weights at first: only the configurations show which components the stages have.
    folder = resolve_source(source or name, revision or None, ())
    spec = read_model_spec(name, folder, dtype)
    stages = [stage for stage in spec.pipeline.stages if choice.selects(stage)]
    resolve_source(spec.source, None, {component for stage in stages for component in stage.components}, on_progress)
    return spec, folder


def read_model_spec(name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
    """Return the spec of the model in a folder, served as `name`.

    Raises ConfigError if the model is not supported, or its stages do not fit together.
    """
    spec = find(folder).model_spec(name, folder, dtype)
    try:
        spec.pipeline.validate()
    except ConfigError as error:
        raise ConfigError(f"model {name} of family {spec.family}: {error}") from error
    return spec
