"""Wan: text-to-image, text-to-video and image-to-video, with one text encoder and a causal video VAE.

The stages do what diffusers' WanPipeline does, in its order of operations, with its components. An image is a video of
one frame. Checked against diffusers 0.42.

In Wan 2.2, model_index.json has two more settings. With a `boundary_ratio`, a second transformer runs the steps of low
noise, with a guidance scale of its own if one is set. With `expand_timesteps` (the 5B model), each token has a
timestep.

For image-to-video an image is encoded twice, by CLIP and by the VAE, as in WanImageToVideoPipeline. A last frame may
be sent beside the first one or is required, depending on the transformer's inputs. Text encoder and VAE are those of
text-to-video, so that both kinds of model share their pools. Wan 2.2 has no CLIP. With a timestep for each token, the
VAE encodes the image alone, as the first frame.

The class in model_index.json prepares an image for CLIP, as in an undivided pipeline. CLIPImageProcessorPil always uses
Pillow. The other two use torchvision where it is installed, else Pillow. Resizing differs a little between them, so the
same seed gives the same video only on machines that have the same one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs
from msgspec.structs import replace
from typing_extensions import override

from unfuse.core.errors import ConfigError
from unfuse.core.modalities import LAST_FRAME, PIXELS, UPLOAD, MediaLimits, OutputSize
from unfuse.core.model_spec import START_IMAGE, AcceptedInput, ModelSpec
from unfuse.core.object_ref import ALIGNMENT, DTYPES
from unfuse.core.plan import Params, StageSpec
from unfuse.models.base import Loader
from unfuse.models.components import (
    T5_TOKENIZERS,
    FlowDenoiser,
    GridVae,
    PictureEncoder,
    VideoFamily,
    VideoShape,
    need_channels,
    text_stage,
)
from unfuse.models.noise_schedulers import EULER, MULTISTEP
from unfuse.models.text_encoders import MaskedTextEncoder
from unfuse.parallel.parallel_plan import ParallelPlan, SequenceDim, TensorParallelLayers
from unfuse.stages.base import guidance_scale, need
from unfuse.stages.specs import IMAGE_ENCODE
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from unfuse.stages.denoise import RowFacts

#: WanPipeline requires sides to be a multiple of this, whatever the VAE.
PIXEL_MULTIPLE = 16

#: The class of models without image input.
TEXT = "WanPipeline"

#: Bytes of a number in latents.
LATENT_BYTES = DTYPES["float32"]

#: The parameter for the second transformer's guidance scale. None: the scale of the first.
SECOND = "guidance_scale_2"


@dataclass(frozen=True)
class Shape(VideoShape):
    """The sizes in a model's configurations, and the shapes of a request's latents."""

    #: Width of the prompt embeddings.
    text_dim: int
    #: Width of the image embeddings. None without an image encoder.
    image_dim: int | None
    #: Latents per token along frames, rows and columns.
    patch: tuple[int, int, int]
    #: The most patches along one axis (frames, rows or columns), by the rotary embedding.
    longest: int
    #: Whether the transformer has the condition made from an image as additional channels.
    takes_image: bool
    #: Whether each token has its own timestep.
    expand: bool
    #: Whether the transformer has image embeddings of a last frame beside those of the first.
    has_last_frame: bool
    #: Whether the first frame is given, which requires a timestep for each token.
    first: bool
    #: The share of the noise below which the second transformer takes over. None with one transformer.
    boundary: float | None

    @classmethod
    def read(cls, folder: ModelFolder) -> Shape:
        """Read the configurations of transformer and VAE.

        Raises ConfigError if they do not fit each other.
        """
        transformer, vae = folder.config("transformer"), folder.config("vae")
        index = folder.index()
        with folder.reading("transformer or vae"):
            frames, rows, columns = transformer["patch_size"]
            halvings = [bool(is_temporal) for is_temporal in vae["temperal_downsample"]]
            latent_channels = int(vae["z_dim"])
            channels = int(transformer["in_channels"])
            temporal = int(vae.get("scale_factor_temporal") or 2 ** sum(halvings))
            spatial = int(vae.get("scale_factor_spatial") or 2 ** len(halvings) * (vae.get("patch_size") or 1))
            image_dim = transformer.get("image_dim")
            expand = bool(index.get("expand_timesteps"))
            shape = cls(
                channels=latent_channels,
                spatial=spatial,
                temporal=temporal,
                text_dim=int(transformer["text_dim"]),
                image_dim=image_dim,
                patch=(int(frames), int(rows), int(columns)),
                longest=int(transformer["rope_max_seq_len"]),
                takes_image=image_dim is not None or channels == temporal + 2 * latent_channels,
                expand=expand,
                has_last_frame=transformer.get("pos_embed_seq_len") is not None,
                first=expand and index.get("_class_name") != TEXT,
                boundary=index.get("boundary_ratio"),
            )
        need_channels(folder, latent_channels + (shape.condition if shape.takes_image else 0), channels)
        return shape

    @property
    def condition(self) -> int:
        """The number of channels of a condition: a mask of the given frames, and latents."""
        return self.temporal + self.channels

    @override
    def grid(self, params: Params) -> tuple[int, int, int]:
        """Return frames, rows and columns of latents, rounded as in WanPipeline."""
        frames = need(params, "num_frames", int)
        if frames % self.temporal != 1:
            frames = frames // self.temporal * self.temporal + 1
        rows, columns = self.spatial * self.patch[1], self.spatial * self.patch[2]
        return (
            (max(frames, 1) - 1) // self.temporal + 1,
            need(params, "height", int) // rows * self.patch[1],
            need(params, "width", int) // columns * self.patch[2],
        )

    def limits(self, defaults: Params) -> MediaLimits:
        """Return the limits of requests that follow from the configurations."""
        multiple = lcm(PIXEL_MULTIPLE, self.spatial * self.patch[1], self.spatial * self.patch[2])
        longest = min(self.patch[1:]) * self.spatial * self.longest
        limits = self.bounds(multiple, defaults)
        return replace(
            limits,
            max_size=min(limits.max_size, longest // multiple * multiple),
            max_frames=min(limits.max_frames, self._max_frames()),
        )

    def check_limits(self, limits: MediaLimits) -> None:
        """Raise ConfigError if the limits exceed the rotary embedding."""
        longest = min(self.patch[1:]) * self.spatial * self.longest
        if limits.max_size > longest or limits.max_frames > self._max_frames():
            allowed = f"{longest} pixels and {self._max_frames()} frames"
            raise ConfigError(f"serving.json: the transformer's rope_max_seq_len allows {allowed}; lower the limits")

    def _max_frames(self) -> int:
        """Return the most frames of a video, by the rotary embedding."""
        return (self.longest * self.patch[0] - 1) * self.temporal + 1


class WanTextEncoder(MaskedTextEncoder):
    """UMT5 as a TextEncoder."""

    @override
    def _tokenize(self, texts: Sequence[str], length: int, padding: str = "max_length") -> Any:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return super()._tokenize([prompt_clean(text) for text in texts], length, padding)

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """Return `prompt_embeds` (texts, length, text dim), zero after a text's own tokens."""
        tokens = self._tokens(texts, length)
        hidden = self._encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
        embeds = hidden.new_zeros(hidden.shape, dtype=self._encoder.dtype)
        for row, (start, stop) in enumerate(tokens.spans):
            embeds[row, : stop - start] = hidden[row, : stop - start]
        return {"prompt_embeds": embeds}


class WanDenoiser(FlowDenoiser):
    """A Denoiser of one or two transformers, conditioned on an image for image-to-video.

    `image_embeds` is (1, tokens, image dim) from CLIP, or (1, 2, tokens, image dim) with a last frame. `condition` is
    (1, mask and latent channels, frames, height, width). With a timestep for each token it is the first frame's latents
    instead.
    """

    guidance = staticmethod(guidance_scale)

    def __init__(self, loader: Loader) -> None:
        self._shape = shape = Shape.read(loader.folder)
        super().__init__(loader, shape.latents)
        self._low = None if shape.boundary is None else loader.model("transformer_2")
        self.transformers += (self._low,) if self._low else ()
        self.sets_begin = loader.folder.kind == TEXT
        self._boundary = (shape.boundary or 0) * self._scheduler.config.num_train_timesteps

        self.embeds = {"prompt_embeds": (1, None, shape.text_dim)}
        embeds_shape = (1, 2, None, shape.image_dim) if shape.has_last_frame else (1, None, shape.image_dim)
        image_embeds = {} if shape.image_dim is None else {"image_embeds": embeds_shape}
        if shape.takes_image or shape.first:
            channels = shape.condition if shape.takes_image else shape.channels
            self.conditions = image_embeds | {"condition": (1, channels, None, None, None)}

    @override
    def verify(self, params: Params) -> None:
        super().verify(params)
        if params.get(SECOND) is not None:
            need(params, SECOND, float)

    def predict(
        self,
        latents: Tensor,
        timestep: Tensor,
        inputs: Mapping[str, Tensor],
        params: Params,
        facts: Sequence[RowFacts],
    ) -> Tensor:
        """Return the velocity, in the shape of the latents.

        Each of two transformers runs the rows at its noise levels.
        """
        import torch

        velocities: list[Tensor] = [latents] * len(latents)
        for is_low, transformer in enumerate(self.transformers):
            rows = [row for row, row_facts in enumerate(facts) if row_facts.phase == bool(is_low)]
            if len(rows) == len(latents):
                return self._velocity(transformer, latents, timestep, inputs)
            if rows:
                # Joined row by row, because an index on the host would be copied to the device.
                tensors = {"latents": latents, "timestep": timestep, **inputs}
                picked = {name: torch.cat([tensor[row : row + 1] for row in rows]) for name, tensor in tensors.items()}
                velocity = self._velocity(transformer, picked.pop("latents"), picked.pop("timestep"), picked)
                for index, row in enumerate(rows):
                    velocities[row] = velocity[index : index + 1]
        return torch.cat(velocities)

    @override
    def combine(self, towards: Tensor, away: Tensor, scale: float, phase: Hashable, params: Params) -> Tensor:
        """Return the guided prediction, at low noise with the second scale if it is set."""
        if phase and params.get(SECOND) is not None:
            scale = need(params, SECOND, float)
        return super().combine(towards, away, scale, phase, params)

    @override
    def phases(self, timesteps: Tensor) -> Sequence[bool]:
        """Return, for each timestep, whether the second transformer runs it."""
        if self._low is None:
            return (False,) * len(timesteps)
        is_low: list[bool] = (timesteps < self._boundary).tolist()
        return is_low

    @override
    def rows_per_latent(self, latents: Tensor) -> int:
        """Return the number of timesteps of a row: one, or one for each token."""
        return self._tokens(latents).numel() if self._shape.expand else 1

    @override
    def finish_latents(self, latents: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the latents, with the given first frame if there is one."""
        return self._with_first(latents, inputs) if self._shape.expand else latents

    def _velocity(self, transformer: Any, latents: Tensor, timestep: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the velocity that this transformer predicts, in the shape of the latents."""
        import torch

        condition = inputs.get("condition")
        image_embeds = inputs.get("image_embeds")
        if self._shape.expand:
            timestep = self._token_timesteps(latents, timestep, condition)
            latents = self._with_first(latents, inputs)
        elif condition is not None:
            latents = torch.cat([latents, condition.to(latents.dtype)], 1)
        velocity: Tensor = transformer(
            hidden_states=latents,
            timestep=timestep,
            encoder_hidden_states=inputs["prompt_embeds"],
            encoder_hidden_states_image=None if image_embeds is None else image_embeds.to(latents.dtype).flatten(0, -3),
            return_dict=False,
        )[0]
        return velocity

    def _with_first(self, latents: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the latents with the given first frame, if there is one."""
        import torch

        first = inputs.get("condition")
        return latents if first is None else torch.cat([first.to(latents.dtype), latents[:, :, 1:]], 2)

    def _token_timesteps(self, latents: Tensor, timestep: Tensor, first: Tensor | None) -> Tensor:
        """Return the timesteps of all tokens (rows, tokens), zero in a given first frame."""
        is_noisy = latents.new_ones(self._tokens(latents).shape).float()
        if first is not None:
            is_noisy[0] = 0
        return is_noisy.flatten() * timestep[:, None]

    def _tokens(self, latents: Tensor) -> Tensor:
        """Return one latent of each token of the first row of latents, (frames, rows, columns)."""
        _, rows, columns = self._shape.patch
        return latents[0, 0, :, ::rows, ::columns]


class WanVae(GridVae):
    """The VAE as a CausalDecoder.

    A latent frame depends on those before it, through the cache of the layers' features.
    """

    def fragment_count(self, grid: Tensor) -> int:
        """Return the number of fragments: one per latent frame, or 1 with VAE tiling.

        A tile is decoded for all frames at once.
        """
        return 1 if self.vae.use_tiling else grid.shape[2]

    def decode_fragments(self, grid: Tensor) -> Iterator[Tensor]:
        """Yield the pixels of each latent frame, as AutoencoderKLWan's loop computes them.

        The features that layers cache belong to this call alone.
        """
        import torch
        from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

        vae = self.vae
        mean, scale = self.norm(grid)
        latents = vae.post_quant_conv(grid / scale + mean)
        # The cache is taken from the VAE, because other requests may be decoded between two fragments.
        vae.clear_cache()
        cache, vae._feat_map = vae._feat_map, []
        patch = vae.config.patch_size
        for index in range(grid.shape[2]):
            frame = latents[:, :, index : index + 1]
            pixels = vae.decoder(frame, feat_cache=cache, feat_idx=[0], first_chunk=index == 0)
            yield torch.clamp(pixels if patch is None else unpatchify(pixels, patch_size=patch), min=-1.0, max=1.0)


class Wan(VideoFamily):
    """The family of WanPipeline: text encoding, denoising and VAE decoding."""

    name = "wan"
    source = ("pipelines/wan/pipeline_wan.py", TEXT)
    classes = {
        "tokenizer": ("transformers", T5_TOKENIZERS),
        "text_encoder": ("transformers", ("UMT5EncoderModel",)),
        "transformer": ("diffusers", ("WanTransformer3DModel",)),
        "scheduler": ("diffusers", (*MULTISTEP, EULER)),
        "vae": ("diffusers", ("AutoencoderKLWan",)),
    }
    text_encoders = {"text_encode": partial(WanTextEncoder, guidance=guidance_scale)}
    shape = Shape.read
    denoiser = WanDenoiser
    vae = WanVae
    parallel_plans = ParallelPlan(
        blocks=("blocks",),
        attention="attn1",
        order=("tokens",),
        block_inputs={"hidden_states": SequenceDim(1, ("tokens",))},
        follow={"rotary_emb": (SequenceDim(1, ("tokens",)),), "temb": (SequenceDim(1, ("tokens",), dims=4),)},
        block_outputs=(SequenceDim(1, ("tokens",)),),
        matrices=TensorParallelLayers(
            outputs=("blocks.*.to_[qkv]", "blocks.*.add_[kv]_proj", "blocks.*.net.0.proj"),
            inputs=("blocks.*.to_out.0", "blocks.*.net.2"),
            norms=("blocks.*.norm_[qk]", "blocks.*.norm_added_k"),
            heads=("blocks.*.attn?.heads",),
            divided=("num_attention_heads", "ffn_dim"),
        ),
    )

    @override
    def served(self, index: Mapping[str, Any]) -> Mapping[str, tuple[str, tuple[str, ...]]]:
        transformer_2 = {} if index.get("boundary_ratio") is None else {"transformer_2": self.classes["transformer"]}
        return {**self.classes, **transformer_2}

    @override
    def settings(self, index: Mapping[str, Any]) -> dict[str, str]:
        values = {name: index[name] for name in ("boundary_ratio", "expand_timesteps") if index.get(name)}
        return {"transformer": f"{values}{bool(self.accepts)}"} if values else {}

    @override
    def standard(self, folder: ModelFolder) -> Params:
        shape = Shape.read(folder)
        scale_2: Params = {} if shape.boundary is None else {SECOND: None}
        return {**super().standard(folder), "negative_prompt": "", **scale_2}

    @override
    def limits(self, folder: ModelFolder, defaults: Params) -> MediaLimits:
        shape = Shape.read(folder)
        if shape.takes_image != (bool(self.accepts) and not shape.expand):
            wants = "a picture, but its class is not" if shape.takes_image else "no picture, but its class is"
            raise ConfigError(f"model {folder.path}: the transformer takes {wants} for image to video")
        return shape.limits(defaults)

    @override
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        """Return the text stage. Raises ConfigError if serving.json's limits exceed the transformer's."""
        shape = Shape.read(folder)
        shape.check_limits(limits)
        embeds_bytes = limits.max_sequence_length * shape.text_dim * widths["text_encoder"]
        return (text_stage({"prompt_embeds": embeds_bytes}, "guidance_scale"),)


FAMILY = Wan()


#: How many frames AutoencoderKLWan always encodes at a time after the first frame. It drops a remainder.
ENCODED_FRAMES = 4


class WanPicture(PictureEncoder):
    """The VAE and, if there is one, CLIP's image encoder, as an ImageEncoder."""

    extra_uploads: Sequence[str] = (LAST_FRAME,)

    def __init__(self, loader: Loader) -> None:
        has_clip = any(loader.folder.index().get("image_encoder") or ())
        self._clip = (loader.plain("image_processor"), loader.model("image_encoder")) if has_clip else None
        self._vae, self._shape = WanVae(loader), Shape.read(loader.folder)
        self.vae = self._vae.vae

    @override
    def verify(self, params: Params) -> None:
        """Raise PermanentError for a size that does not fit."""
        self._shape.latents(params)

    def encode(self, pictures: Mapping[str, Sequence[Image]], params: Params) -> dict[str, Tensor]:
        """Return the denoiser's `condition` and, with CLIP, `image_embeds`, a row per image."""
        condition = {"condition": self._condition(pictures, params)}
        if self._clip is None:
            return condition
        processor, encoder = self._clip
        images = [image for row in zip(*pictures.values(), strict=True) for image in row]
        pixels = processor(images=images, return_tensors="pt").to(self._vae.device)
        embeds = encoder(**pixels, output_hidden_states=True).hidden_states[-2]
        return {"image_embeds": embeds.unflatten(0, (-1, 2)) if LAST_FRAME in pictures else embeds, **condition}

    def _condition(self, pictures: Mapping[str, Sequence[Image]], params: Params) -> Tensor:
        """Return the condition: a mask and float32 latents, or the first frame's latents alone.

        The latents are of a video of the first frame, grey frames and the last frame, if it is given. The mask is 1 for
        given frames. Its channels are the frames of a group that shares one latent frame.
        """
        import torch
        from diffusers.video_processor import VideoProcessor

        vae = self._vae.vae
        temporal, spatial = self._shape.temporal, self._shape.spatial
        _, _, groups, rows, columns = self._shape.latents(params)
        size = {"height": rows * spatial, "width": columns * spatial}
        processor = VideoProcessor(vae_scale_factor=spatial)
        pixels = {name: processor.preprocess(list(images), **size) for name, images in pictures.items()}
        first, last = pixels[UPLOAD], pixels.get(LAST_FRAME)

        frames = 1 if self._shape.first else (groups - 1) * temporal + 1
        video = first.new_zeros(*first.shape[:2], frames, *first.shape[2:])
        video[:, :, 0] = first
        if last is not None:
            video[:, :, -1] = last

        latents = vae.encode(video.to(self._vae.device, vae.dtype)).latent_dist.mode().float()
        mean, scale = self._vae.norm(latents)
        normalized: Tensor = (latents - mean) * scale
        if self._shape.first:
            return normalized

        mask = latents.new_zeros(len(first), temporal, groups, rows, columns)
        mask[:, :, 0] = 1
        if last is not None:
            mask[:, -1, -1] = 1
        return torch.cat([mask, normalized], dim=1)


class WanImage(Wan):
    """The family of WanImageToVideoPipeline. Text and image are encoded in parallel."""

    source = ("pipelines/wan/pipeline_wan_i2v.py", "WanImageToVideoPipeline")
    classes = Wan.classes | {
        "image_encoder": ("transformers", ("CLIPVisionModel", "CLIPVisionModelWithProjection")),
        "image_processor": ("transformers", ("CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil")),
    }
    image_encoder = WanPicture
    accepts = (START_IMAGE,)

    @override
    def model_spec(self, name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
        spec = super().model_spec(name, folder, dtype)
        return replace(spec, accepts=(*spec.accepts, *_last_frame(Shape.read(ModelFolder(folder)))))

    @override
    def components(self, folder: ModelFolder) -> dict[str, tuple[str, str]]:
        """Return the library and class of each component. Raises ConfigError.

        Image processors are named without the suffix Fast, which newer versions of transformers have dropped.
        """
        classes = super().components(folder)
        renamed = {
            part: (library, name.removesuffix("Fast")) for part, (library, name) in classes.items() if "image" in part
        }
        return classes | renamed

    @override
    def served(self, index: Mapping[str, Any]) -> Mapping[str, tuple[str, tuple[str, ...]]]:
        """Return the supported classes, with CLIP's image encoder and processor or without both."""
        classes = super().served(index)
        has_clip = any(index.get("image_encoder") or ())
        return {name: entry for name, entry in classes.items() if has_clip or not name.startswith("image")}

    @override
    def settings(self, index: Mapping[str, Any]) -> dict[str, str]:
        """Return settings that change what a component does.

        With a timestep for each token, the VAE encodes the first frame alone.
        """
        settings = super().settings(index)
        return {**settings, "vae": "first frame"} if index.get("expand_timesteps") else settings

    @override
    def limits(self, folder: ModelFolder, defaults: Params) -> MediaLimits:
        limits = super().limits(folder, defaults)
        return structs.replace(limits, frame_multiple=lcm(limits.frame_multiple, ENCODED_FRAMES))

    @override
    def parallelism(self, folder: ModelFolder) -> dict[str, dict[str, int]]:
        """Return the kinds of parallelism that each stage kind supports.

        For image encoding: tensor parallelism of CLIP, and tiles of the VAE.
        """
        # All stages of a role have the same degrees, so text encoding accepts `tiles`, and runs whole on each rank.
        supported = {IMAGE_ENCODE.kind: {"tensor": 0}} | super().parallelism(folder)
        return {kind: supported[kind] | ({"tiles": 0} if kind.endswith("_encode") else {}) for kind in supported}

    @override
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        shape = Shape.read(folder)
        clip = [name for name in self.components(folder) if name.startswith("image")]
        if shape.image_dim is not None and not clip:
            raise ConfigError(
                f"model {folder.path}: the transformer needs CLIP embeddings, but there is no image_encoder"
            )

        # A first frame alone has one latent frame for any length, so the longest video counts as one group.
        channels, group = (shape.channels, limits.max_frames) if shape.first else (shape.condition, shape.temporal)
        embeds = _embeds_size(folder) * widths["image_encoder"] * (1 + shape.has_last_frame) + ALIGNMENT if clip else 0
        image_stage = replace(
            IMAGE_ENCODE,
            components=(*clip, "vae"),
            outputs=("image_embeds", "condition") if clip else ("condition",),
            output_size=OutputSize(embeds + ALIGNMENT, channels * LATENT_BYTES / shape.spatial**2, group),
            depends_on_params=("image", *PIXELS, LAST_FRAME),
        )
        return (*super().encoders(folder, limits, widths), image_stage)


def _last_frame(shape: Shape) -> tuple[AcceptedInput, ...]:
    """Return the last frame as an upload, if the transformer supports it.

    It is required if the transformer has inputs for CLIP's embeddings of both frames.
    """
    if shape.has_last_frame or (shape.takes_image and shape.image_dim is None):
        return (AcceptedInput(LAST_FRAME, "end", min=int(shape.has_last_frame)),)
    return ()


def _embeds_size(folder: ModelFolder) -> int:
    """Return the number of values in CLIP's embeddings of an image."""
    clip = folder.config("image_encoder")
    with folder.reading("image_encoder"):
        return ((int(clip["image_size"]) // int(clip["patch_size"])) ** 2 + 1) * int(clip["hidden_size"])


IMAGE_TO_VIDEO = WanImage()
