"""Default frame rates of diffusers' video pipelines.

A rate is that of the pipeline's example in diffusers (`export_to_video(…, fps=…)`). If the example has none, or not
the rate of the training data, it is that of the model's authors: 24 for HunyuanVideo and SkyReels, 30 for Mochi, 8
for AnimateDiff and Latte.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RATES: Mapping[str, int] = {
    "Allegro": 15,
    "AnimateDiff": 8,
    "AnyFlow": 16,
    "ChronoEdit": 16,
    "CogVideoX": 8,
    "ConsisID": 8,
    "Cosmos": 30,
    "Cosmos2VideoToWorld": 16,
    "Cosmos2_5_Predict": 16,
    "EasyAnimate": 8,
    "Helios": 24,
    "Hunyuan": 24,
    "HunyuanVideoFramepack": 30,
    "I2VGenXL": 16,
    "Kandinsky5": 24,
    "Kandinsky6": 24,
    "LTX": 25,
    "Latte": 8,
    "LucyEdit": 24,
    "Mochi": 30,
    "MotifVideo": 24,
    "PIA": 8,
    "SanaImageToVideo": 16,
    "SanaVideo": 16,
    "SanaWM": 16,
    "SkyReelsV2": 24,
    "StableVideoDiffusion": 7,
    "TextToVideo": 8,
    "VideoToVideoSD": 8,
    "Wan": 16,
    "WanAnimate": 30,
}
"""Frames a second by prefix of the pipeline's class name. The longest matching prefix applies."""

EXPANDED_WAN = 24  # Wan 2.2 5B, which has a timestep for each token (expand_timesteps)
COGVIDEOX_1_5 = 16  # recognized by its temporal patch size


def frame_rate(pipeline: str, index: Mapping[str, Any], transformer: Mapping[str, Any]) -> int | None:
    """Return the frames a second of a model's videos, or None for an unknown class.

    Args:
        pipeline: the class that model_index.json names.
        index: model_index.json.
        transformer: the configuration of the transformer, empty if there is none.
    """
    if pipeline.startswith("Wan") and index.get("expand_timesteps"):
        return EXPANDED_WAN
    if pipeline.startswith("CogVideoX") and transformer.get("patch_size_t"):
        return COGVIDEOX_1_5
    begins = [name for name in RATES if pipeline.startswith(name)]
    return RATES[max(begins, key=len)] if begins else None
