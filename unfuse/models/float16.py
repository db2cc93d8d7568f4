"""The components that compute in float16 without overflow.

float16 has no number above 65,504. Weights that were trained in bfloat16 may have larger activations, which become
infinite, and then the result is black or NaN. So only classes are listed for which float16 is documented; other
components are loaded in float32 on GPUs that do not compute in bfloat16.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from unfuse.core.model_spec import ModelSpec
from unfuse.stages.specs import UNDIVIDED

#: Classes of components that are published in float16, or that diffusers documents in float16. Missing on purpose: T5
#: and UMT5, whose activations overflow, and Qwen2 and its vision-language models, whose attention does.
FLOAT16_CLASSES = frozenset(
    {
        "CLIPTextModel",
        "CLIPTextModelWithProjection",
        "CLIPVisionModel",
        "CLIPVisionModelWithProjection",
        "FluxTransformer2DModel",
        "LlamaForCausalLM",
        "LlamaModel",
        "SD3Transformer2DModel",
        "UNet2DConditionModel",
        "WanTransformer3DModel",
    }
)


def float16_components(model_spec: ModelSpec, classes: Mapping[str, str], roles: Collection[str]) -> set[str]:
    """Return the components of these roles that compute in float16.

    `classes`: the class of each component with weights, by name.

    An undivided pipeline passes tensors between its components without changing their dtype. So all of them compute in
    float16, or none.
    """
    safe = set[str]()
    for stage in model_spec.pipeline.stages:
        computing = {name for name in stage.components if name in classes and not name.startswith("vae")}
        in_float16 = {name for name in computing if classes[name] in FLOAT16_CLASSES}
        if stage.role in roles and (in_float16 == computing or stage.kind != UNDIVIDED.kind):
            safe |= in_float16
    return safe
