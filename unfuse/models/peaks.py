"""The largest memory of a forward's activations, by formula from a component's configuration.

The formulas count the tensors that live at the same time in an eager forward with fused attention. A test compares them
with forwards on torch's meta device. They need no torch, because servers plan without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import prod
from typing import Any

import msgspec
from msgspec.structs import replace

from unfuse.core.errors import ConfigError
from unfuse.core.model_spec import ModelSpec
from unfuse.core.text import GATHERED_KV_BYTES, PREFILL_CHUNK_TOKENS
from unfuse.weights.folder import LANGUAGE, SINGLE_COMPONENT, VISION, ModelFolder

Config = Mapping[str, Any]

FLOAT32 = 4  # bytes of a number


class ForwardSize(msgspec.Struct, frozen=True):
    """The size of a forward."""

    #: Bytes of a number in the component's dtype.
    width: int = 2
    #: Requests in the batch. Both halves of guidance in one forward count as two.
    batch: int = 1
    #: Columns of a picture or frame, in pixels.
    columns: int = 1024
    #: Rows of a picture or frame, in pixels.
    rows: int = 1024
    #: Frames of a video; 1 for a picture.
    frames: int = 1
    #: Tokens of each prompt, with padding. For a language model, the tokens of a chunk.
    tokens: int = 512
    #: Sequences of a language model that get a token in one forward.
    texts: int = 1
    #: Pixels per latent along a side of a picture, by the VAE.
    spatial: int = 8
    #: Frames per latent along time, by the VAE.
    temporal: int = 1
    #: Whether the VAE processes a picture in tiles.
    tiled: bool = False

    @property
    def pixels(self) -> int:
        """The pixels of all pictures, or of one frame of each video."""
        return self.batch * self.columns * self.rows

    @property
    def latents(self) -> int:
        """The positions of all latents in a grid."""
        return self.pixels // self.spatial**2 * self.latent_frames

    @property
    def latent_frames(self) -> int:
        """The frames of a video's latents. The first frame has a latent of its own."""
        return (self.frames - 1) // self.temporal + 1


class Blocks(msgspec.Struct, frozen=True):
    """The live numbers of a transformer at its peak, in multiples of its width.

    There are two candidates for the peak: attention, and the feed-forward layer.
    """

    #: In the transformer's dtype, for each token of the picture.
    picture: float
    #: The same, for each token of the text. 0: the text is read by cross-attention only.
    text: float = 0.0
    #: In float32, for each token of picture and text: norms and rotary embeddings of a transformer of smaller dtype.
    float32: float = 0.0
    #: Beside two copies of the hidden layer: in the transformer's dtype, for each token. 0: `picture` includes it.
    beside_hidden: float = 0.0
    #: Latents of one token: rows times columns; 0: by the configuration's `patch_size`.
    patch: int = 0


#: By class of diffusers.
BLOCKS = {
    "FluxTransformer2DModel": Blocks(13.25, 13.25, 2.0, patch=4),
    "Flux2Transformer2DModel": Blocks(21.5, 21.5, patch=4),
    "HunyuanVideoTransformer3DModel": Blocks(14.15, 14.15, 2.0),
    "LTXVideoTransformer3DModel": Blocks(12.15, 0.0, 2.0),
    "QwenImageTransformer2DModel": Blocks(15.05, 6.5),
    "SD3Transformer2DModel": Blocks(13.2, 3.7),
    "WanTransformer3DModel": Blocks(3.1, 0.0, 4.0, beside_hidden=4.15),
}

#: For any other transformer: more than any of the above but one, whose single blocks have the widest hidden layers.
OTHER_BLOCKS = Blocks(16.0, 16.0, 2.0)

#: Memory of convolutions on a GPU beside their tensors: the workspace of cuDNN, as a factor. Measured on an H100, in
#: float32 and bfloat16: FLUX's VAE at 1024 × 1024 takes 4.8 where tensors take 3.0, and Wan's 8.5 where they take 7.3.
WORKSPACE_2D, WORKSPACE_3D = 1.6, 1.16


class VideoVae(msgspec.Struct, frozen=True):
    """The live numbers of a video VAE at its peak, in multiples of its channels."""

    #: The configuration's field with these channels.
    channels: str
    #: For each pixel of the frames that are decoded at a time.
    decode: float
    #: For each pixel of the frames that are encoded at a time.
    encode: float
    #: For each pixel of a single picture when it is decoded, and when it is encoded.
    picture: tuple[float, float]
    #: Frames that are processed at a time; 0: all frames of a video.
    frames: int = 0
    #: The side of a tile in pixels.
    tile: int = 256


#: By class of diffusers.
VIDEO_VAES = {
    "AutoencoderKLWan": VideoVae("base_dim", 12.67, 9.17, (18.0, 10.1), frames=4),
    "AutoencoderKLHunyuanVideo": VideoVae("block_out_channels", 9.13, 5.2, (9.13, 5.2), frames=17),
    "AutoencoderKLQwenImage": VideoVae("base_dim", 12.67, 9.17, (18.0, 10.1), frames=4),
}

#: Tokens of the template around a prompt whose text encoder is a language model. No family has more.
TEMPLATE_TOKENS = 96

#: The side in pixels where neither the request nor the model has a size.
USUAL_SIDE = 1024


def transformer_peak(kind: str, config: Config, size: ForwardSize) -> int:
    """Return the peak of a denoiser's transformer.

    `kind`: the name of its class.
    """
    blocks = BLOCKS.get(kind, OTHER_BLOCKS)
    hidden = _hidden_size(config)
    picture = size.latents // (blocks.patch or prod(_patch(config)))
    text = size.batch * size.tokens
    numbers = picture * blocks.picture + text * blocks.text
    wide = (picture + (text if blocks.text else 0)) * blocks.float32
    attention = numbers * size.width + wide * FLOAT32
    feed_forward = 0.0
    if blocks.beside_hidden:
        layers = 2 * int(config["ffn_dim"]) / hidden + blocks.beside_hidden
        feed_forward = picture * layers * size.width
    return int(hidden * max(attention, feed_forward))


def unet_peak(config: Config, size: ForwardSize) -> int:
    """Return the peak of a UNet: its first level with attention, and the skip connections."""
    channels, layers = [*map(int, config["block_out_channels"])], int(config.get("layers_per_block") or 2)
    skips = channels[0] + sum(
        (layers * count + (count if level < len(channels) - 1 else 0) / 4) / 4**level
        for level, count in enumerate(channels)
    )
    attended = (
        count / 4**level
        for level, (count, block) in enumerate(zip(channels, config["down_block_types"], strict=True))
        if "Attn" in block
    )
    return int(size.latents * (skips + 21 * next(attended, channels[0] / 4)) * size.width)


def vae_peak(kind: str, config: Config, size: ForwardSize, *, encodes: bool = False) -> int:
    """Return the peak of a VAE on a GPU, when it decodes or `encodes`."""
    if vae := VIDEO_VAES.get(kind):
        return _video_vae_peak(vae, config, size, encodes)
    if "block_out_channels" not in config:
        return 0
    channels = [*map(int, config["block_out_channels"])]
    tile = _one_tile(size, int(config.get("sample_size") or 512))
    numbers = tile.pixels * (5 * channels[0] if encodes else 3 * channels[min(1, len(channels) - 1)])
    return int((numbers * WORKSPACE_2D + (3 * size.pixels if size.tiled else 0)) * size.width)


def text_encoder_peak(kind: str, config: Config, size: ForwardSize) -> int:
    """Return the peak of a text encoder."""
    if "d_model" in config:  # T5
        tokens = size.batch * size.tokens
        bias = int(config["num_heads"]) * size.tokens**2  # one for all texts of the batch
        hidden = tokens * (3 * int(config["d_ff"]) + 6.5 * int(config["d_model"]))
        return int(max(hidden + bias, 8 * tokens * int(config["d_model"]) + 2 * bias) * size.width)
    if "CLIP" in kind:
        tokens = size.batch * int(config.get("max_position_embeddings") or 77)
        return 16 * tokens * int(config["hidden_size"]) * size.width
    text = config.get("text_config") or config
    if "hidden_size" not in text:
        return 0
    # encoders return the hidden states of all layers
    tokens, hidden = size.batch * (size.tokens + TEMPLATE_TOKENS), int(text["hidden_size"])
    states = hidden * (int(text["num_hidden_layers"]) + 2)
    return int(tokens * (3 * int(text["intermediate_size"]) + states) * size.width)


def language_peak(config: Config, size: ForwardSize) -> int:
    """Return the peak of a language model: of prefill, or of a decode step."""
    tokens, hidden = size.batch * size.tokens, int(config["hidden_size"])
    layer = tokens * (3 * int(config["intermediate_size"]) + 4 * hidden) * size.width
    # logits in the model's dtype, and twice in float32 while tokens are drawn
    logits = size.texts * int(config.get("vocab_size") or 0) * (size.width + 2 * FLOAT32)
    return max(layer + _gathered_kv(config, size), logits)


def _gathered_kv(config: Config, size: ForwardSize) -> int:
    """Return the most bytes of keys and values that texts gather at once.

    These are of one layer. With padding, they may be twice those of the texts. They are few, so they count with any
    `--decode-attention`.
    """
    if size.texts == 1:
        return 0
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    token_bytes = 2 * int(config.get("num_key_value_heads") or heads) * width * size.width
    return min(2 * size.texts * int(config["max_position_embeddings"]) * token_bytes, GATHERED_KV_BYTES)


def vision_peak(config: Config, size: ForwardSize) -> int:
    """Return the peak of the vision encoder of a language model, for one picture."""
    patches, hidden = size.pixels // int(config.get("patch_size") or 14) ** 2, int(config["hidden_size"])
    attention = hidden * (2.2 * size.width + 8 * FLOAT32)  # rotary embeddings are in float32
    return int(patches * max(attention, (3 * int(config["intermediate_size"]) + 4 * hidden) * size.width))


def _hidden_size(config: Config) -> int:
    """Return the width of a transformer of diffusers."""
    if heads := config.get("num_attention_heads"):
        return int(heads) * int(config.get("attention_head_dim") or 64)
    return int(config.get("dim") or config.get("hidden_size") or 0)


def _patch(config: Config) -> list[int]:
    """Return the latents of one token along each axis."""
    patch = config.get("patch_size") or 1
    if isinstance(patch, int):
        return [int(config.get("patch_size_t") or 1), patch, patch]
    return [*map(int, patch)]


def _one_tile(size: ForwardSize, side: int) -> ForwardSize:
    """Return the size of the largest tile; the size itself without tiles."""
    if not size.tiled:
        return size
    return replace(size, batch=1, columns=min(side, size.columns), rows=min(side, size.rows))


def _video_vae_peak(vae: VideoVae, config: Config, size: ForwardSize, encodes: bool) -> int:
    """Return the peak of a video VAE when it decodes, or when it `encodes`."""
    channels = config[vae.channels]
    tile = _one_tile(size, vae.tile)
    numbers = vae.picture[encodes] if size.frames == 1 else vae.encode if encodes else vae.decode
    positions = tile.pixels * min(size.frames, vae.frames or size.frames)
    # beside them, the pixels of the whole result
    wide = positions * numbers * int(channels[0] if isinstance(channels, list) else channels) * WORKSPACE_3D
    return int((wide + 3 * size.pixels * size.frames) * size.width)


def component_peak(component: str, kind: str, config: Config, size: ForwardSize) -> int:
    """Return the peak of a component on a GPU; 0 if it is unknown.

    `component`: its folder in the model, or `model`, `language` or `vision` of a language model.
    """
    with suppress(LookupError, TypeError, ValueError, ArithmeticError):
        if component.startswith("transformer"):
            return transformer_peak(kind, config, size)
        if component == "unet":
            return unet_peak(config, replace(size, batch=2 * size.batch))  # both halves of guidance
        if component.startswith("vae"):
            return max(vae_peak(kind, config, size), vae_peak(kind, config, size, encodes=True))
        if component.startswith("text_encoder"):
            return text_encoder_peak(kind, config, size)
        if component == VISION:
            return vision_peak(config["vision_config"], size)
        if component in (SINGLE_COMPONENT, LANGUAGE):
            return language_peak(config.get("text_config") or config, size)
    return 0


def default_size(spec: ModelSpec, folder: ModelFolder, *, tiled: bool = False) -> ForwardSize:
    """Return the size of one request with the model's defaults.

    For a language model: a chunk of a prompt, the largest picture, and a token of each text of a worker.
    """
    if folder.is_transformers_model:
        texts = max(stage.slots for stage in spec.pipeline.stages)
        side = int((spec.vision.pictures.max_pixels if spec.vision else 0) ** 0.5)
        return ForwardSize(columns=side, rows=side, tokens=PREFILL_CHUNK_TOKENS, texts=texts)

    spatial, temporal = 8, 1
    with suppress(ConfigError, TypeError, ValueError):
        spatial, temporal = _vae_scale(folder.config("vae"))

    def default(name: str, otherwise: int) -> int:
        value = spec.defaults.get(name)
        return value if isinstance(value, int) and value > 0 else otherwise

    return ForwardSize(
        columns=default("width", USUAL_SIDE),
        rows=default("height", USUAL_SIDE),
        frames=default("num_frames", 1),
        tokens=default("max_sequence_length", int(spec.limits.get("max_sequence_length") or 512)),
        spatial=spatial,
        temporal=temporal,
        tiled=tiled,
    )


def _vae_scale(config: Config) -> tuple[int, int]:
    """Return the pixels and the frames per latent of a VAE."""
    if "temperal_downsample" in config:  # the spelling of diffusers
        halvings = config["temperal_downsample"]
        return 2 ** len(halvings) * int(config.get("patch_size") or 1), 2 ** sum(map(bool, halvings))
    if spatial := config.get("spatial_compression_ratio"):
        return int(spatial), int(config.get("temporal_compression_ratio") or 1)
    return 2 ** (len(config.get("block_out_channels") or [0] * 4) - 1), 1
