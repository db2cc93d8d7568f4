"""Wan: text to picture, text to video and image to video, with one text encoder and a causal video VAE.

The stages do what diffusers' WanPipeline does, in its order of operations, on its components. A picture is a video of
one frame. Checked against diffusers 0.42.

In Wan 2.2 model_index.json says more. With a `boundary_ratio` a second transformer takes the steps of low noise, with
a guidance scale of its own if one is given. With `expand_timesteps` (the 5B) each token has a timestep.

For image to video a picture is encoded twice, by CLIP and by the VAE, as WanImageToVideoPipeline does it. A last frame
may go beside the first, or has to, by what the transformer sees. Text encoder and VAE are those of text to video, so
that both kinds of model share their pools. Wan 2.2 has no CLIP. Where each token has a timestep, the VAE encodes the
picture alone, as the first frame.

For CLIP a picture is prepared by the class that model_index.json names, which is what an undivided pipeline loads too.
CLIPImageProcessorPil is Pillow everywhere; the other two are torchvision where it is installed, else Pillow. Resizing
differs a little between them, so the same seed gives the same video only on machines that have the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from unfuse.core.model_spec import START_PICTURE, AcceptedInput, ModelSpec
from unfuse.core.object_ref import ALIGNMENT, DTYPES
from unfuse.core.plan import Params, StageSpec
from unfuse.models.base import EULER, MULTISTEP, Loader
from unfuse.models.components import (
    T5_TOKENIZERS,
    FlowDenoiser,
    GridVae,
    MaskedTextEncoder,
    PictureEncoder,
    VideoFamily,
    VideoShape,
    need_channels,
    norm,
    text_stage,
)
from unfuse.parallel.parallel_plan import ParallelPlan, SequenceDim, TensorParallelLayers
from unfuse.stages.base import guidance_scale, need
from unfuse.stages.specs import IMAGE_ENCODE
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor


PIXEL_MULTIPLE = 16  # WanPipeline refuses other sizes, whatever the VAE
TEXT = "WanPipeline"  # the class of models that are given no picture

LATENT_BYTES = DTYPES["float32"]

SECOND = "guidance_scale_2"  # the guidance scale of the second transformer; None for that of the first


@dataclass(frozen=True)
class Shape(VideoShape):
    """Sizes that follow from a model's configurations, and the latents they give a request."""

    text_dim: int
    image_dim: int | None  # width of the image embeddings; None of a model that takes no picture
    patch: tuple[int, int, int]
    longest: int  # most patches along one axis that the rotary embedding has room for
    pictured: bool  # whether the transformer sees a condition made of a picture beside the latents
    expand: bool  # whether each token has a timestep of its own
    ends: bool  # whether the transformer sees by CLIP a last frame beside the first one
    first: bool  # whether the first frame is given, which takes a timestep for each token
    boundary: float | None  # from which part of the noise on, downwards, the second transformer takes over

    @classmethod
    def of(cls, folder: ModelFolder) -> Shape:
        """Read transformer and VAE, whose scale factors are not published. Raises ConfigError for a misfit."""
        transformer, vae, index = folder.config("transformer"), folder.config("vae"), folder.index()
        with folder.reading("transformer or vae"):
            frames, rows, columns = transformer["patch_size"]
            halvings = [bool(also_time) for also_time in vae["temperal_downsample"]]
            own, channels = int(vae["z_dim"]), int(transformer["in_channels"])
            expand, text = bool(index.get("expand_timesteps")), index.get("_class_name") == TEXT
            ends = transformer.get("pos_embed_seq_len") is not None
            temporal, image_dim = (
                int(vae.get("scale_factor_temporal") or 2 ** sum(halvings)),
                transformer.get("image_dim"),
            )
            shape = cls(
                own, int(vae.get("scale_factor_spatial") or 2 ** len(halvings) * (vae.get("patch_size") or 1)),
                temporal, int(transformer["text_dim"]), image_dim,
                (int(frames), int(rows), int(columns)), int(transformer["rope_max_seq_len"]),
                image_dim is not None or channels == temporal + 2 * own,
                expand, ends, expand and not text, index.get("boundary_ratio"),
            )  # fmt: skip
        need_channels(folder, own + (shape.condition if shape.pictured else 0), channels)
        return shape

    @property
    def condition(self) -> int:
        """Channels that stand for a given picture: a mask of the frames it fills, and latents."""
        return self.temporal + self.channels

    @override
    def grid(self, params: Params) -> tuple[int, int, int]:
        """The sizes of a request are rounded as WanPipeline rounds them."""
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
        """What can be asked for, as far as the configurations say."""
        multiple = lcm(PIXEL_MULTIPLE, self.spatial * self.patch[1], self.spatial * self.patch[2])
        longest = min(self.patch[1:]) * self.spatial * self.longest
        usual = self.bounds(multiple, defaults)
        return replace(
            usual,
            max_size=min(usual.max_size, longest // multiple * multiple),
            max_frames=min(usual.max_frames, self._most_frames()),
        )

    def need_room(self, limits: MediaLimits) -> None:
        """Raise ConfigError when the rotary embedding ends before the limits do."""
        longest = min(self.patch[1:]) * self.spatial * self.longest
        if limits.max_size > longest or limits.max_frames > self._most_frames():
            most = f"{longest} pixels and {self._most_frames()} frames"
            raise ConfigError(f"serving.json: the transformer's rope_max_seq_len allows {most}; lower the limits")

    def _most_frames(self) -> int:
        return (self.longest * self.patch[0] - 1) * self.temporal + 1


class WanTextEncoder(MaskedTextEncoder):
    """UMT5; a TextEncoder."""

    @override
    def _tokens(self, texts: Sequence[str], length: int, padding: str = "max_length") -> Any:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return super()._tokens([prompt_clean(text) for text in texts], length, padding)

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """`prompt_embeds` (texts, length, text dim); behind a text's own tokens they are zero."""
        tokens = self._tokens(texts, length)
        mask = tokens.attention_mask
        hidden = self._encoder(tokens.input_ids, mask).last_hidden_state
        embeds = hidden.new_zeros(hidden.shape, dtype=self._encoder.dtype)
        for row, used in enumerate(mask.sum(1).tolist()):
            embeds[row, :used] = hidden[row, :used]
        return {"prompt_embeds": embeds}


class WanDenoiser(FlowDenoiser):
    """Transformers and their noise scheduler's configuration; a Denoiser. A picture, where one is taken, conditions.

    `image_embeds` (1, tokens, image dim) where CLIP sees it, or (1, 2, tokens, image dim) if it sees the last frame
    too; `condition` (1, mask and latent channels, frames, height, width), or with a timestep for each token the latents
    of the first frame.
    """

    guidance = staticmethod(guidance_scale)

    def __init__(self, loader: Loader) -> None:
        self._shape = shape = Shape.of(loader.folder)
        super().__init__(loader, shape.latents)
        self._low = None if shape.boundary is None else loader.model("transformer_2")
        self.transformers += (self._low,) if self._low else ()
        self.sets_begin = loader.folder.kind == TEXT
        self._boundary = (shape.boundary or 0) * self._scheduler.config.num_train_timesteps
        self.embeds = {"prompt_embeds": (1, None, shape.text_dim)}
        seen = (1, 2, None, shape.image_dim) if shape.ends else (1, None, shape.image_dim)
        sees = {} if shape.image_dim is None else {"image_embeds": seen}
        if shape.pictured or shape.first:
            channels = shape.condition if shape.pictured else shape.channels
            self.conditions = sees | {"condition": (1, channels, None, None, None)}

    @override
    def verify(self, params: Params) -> None:
        super().verify(params)
        if params.get(SECOND) is not None:
            need(params, SECOND, float)

    def predict(self, latents: Tensor, timestep: Tensor, inputs: Mapping[str, Tensor], params: Params) -> Tensor:
        """The velocity, shaped as the latents; of two transformers, each runs the rows that are its own."""
        if self._low is None:
            return self._velocity(self._transformer, latents, timestep, inputs)
        high, velocity = timestep >= self._boundary, latents.new_empty(latents.shape)
        for transformer, rows in ((self._transformer, high), (self._low, ~high)):
            if bool(rows.any()):
                own = {name: value[rows] for name, value in inputs.items()}
                velocity[rows] = self._velocity(transformer, latents[rows], timestep[rows], own)
        return velocity

    @override
    def combine(self, towards: Tensor, away: Tensor, scale: float, timestep: Tensor, params: Params) -> Tensor:
        """At low noise by the second scale, if there is one."""
        if self._low is not None and params.get(SECOND) is not None and bool(timestep < self._boundary):
            scale = need(params, SECOND, float)
        return super().combine(towards, away, scale, timestep, params)

    @override
    def phase(self, timestep: Tensor) -> bool:
        """Which of two transformers takes it."""
        return self._low is not None and bool(timestep < self._boundary)

    @override
    def parts(self, latents: Tensor) -> int:
        """Tokens, where each has a timestep."""
        return self._tokens(latents).numel() if self._shape.expand else 1

    @override
    def settle(self, latents: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """A first frame that is given was never noise."""
        return self._with_first(latents, inputs) if self._shape.expand else latents

    def _velocity(self, transformer: Any, latents: Tensor, timestep: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        import torch

        condition, sees = inputs.get("condition"), inputs.get("image_embeds")
        if self._shape.expand:
            latents, timestep = self._with_first(latents, inputs), self._expanded(latents, timestep, condition)
        elif condition is not None:
            latents = torch.cat([latents, condition.to(latents.dtype)], 1)
        velocity: Tensor = transformer(
            hidden_states=latents,
            timestep=timestep,
            encoder_hidden_states=inputs["prompt_embeds"],
            encoder_hidden_states_image=None if sees is None else sees.to(latents.dtype).flatten(0, -3),
            return_dict=False,
        )[0]
        return velocity

    def _with_first(self, latents: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        import torch

        first = inputs.get("condition")
        return latents if first is None else torch.cat([first.to(latents.dtype), latents[:, :, 1:]], 2)

    def _expanded(self, latents: Tensor, timestep: Tensor, first: Tensor | None) -> Tensor:
        """A timestep for each token (rows, tokens): zero where a first frame is given."""
        noisy = latents.new_ones(self._tokens(latents).shape).float()
        if first is not None:
            noisy[0] = 0
        return noisy.flatten() * timestep[:, None]

    def _tokens(self, latents: Tensor) -> Tensor:
        """A number for each token of a row (frames, rows, columns)."""
        _, rows, columns = self._shape.patch
        return latents[0, 0, :, ::rows, ::columns]


class WanVae(GridVae):
    """The VAE; a CausalDecoder: a latent frame needs those before it, of which its layers keep what they need."""

    def pieces(self, grid: Tensor) -> int:
        """A piece for each latent frame; one where the VAE works in tiles: it decodes each to its end."""
        return 1 if self.vae.use_tiling else grid.shape[2]

    def decode_pieces(self, grid: Tensor) -> Iterator[Tensor]:
        """What AutoencoderKLWan does in its loop over latent frames, with layers' memory of the request's own."""
        import torch
        from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

        vae = self._here()
        mean, scale = norm(vae, grid)
        latents = vae.post_quant_conv(grid / scale + mean)
        vae.clear_cache()
        memory, vae._feat_map, patch = vae._feat_map, [], vae.config.patch_size
        for number in range(grid.shape[2]):
            frame = latents[:, :, number : number + 1]
            pixels = self._here().decoder(frame, feat_cache=memory, feat_idx=[0], first_chunk=number == 0)
            yield torch.clamp(pixels if patch is None else unpatchify(pixels, patch_size=patch), min=-1.0, max=1.0)

    def _here(self) -> Any:
        """The VAE, on its device: one that rests elsewhere comes by itself only when its `decode` is called."""
        if (hook := getattr(self.vae, "_hf_hook", None)) is not None:
            hook.pre_forward(self.vae)
        return self.vae


class Wan(VideoFamily):
    """Text encoding, denoising and VAE decoding of a WanPipeline folder."""

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
    shape = Shape.of
    denoiser = WanDenoiser
    vae = WanVae
    cut = ParallelPlan(
        blocks=("blocks",),
        attention="attn1",
        order=("tokens",),
        enter={"hidden_states": SequenceDim(1, ("tokens",))},
        follow={"rotary_emb": (SequenceDim(1, ("tokens",)),), "temb": (SequenceDim(1, ("tokens",), dims=4),)},
        leave=(SequenceDim(1, ("tokens",)),),
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
        second = {} if index.get("boundary_ratio") is None else {"transformer_2": self.classes["transformer"]}
        return {**self.classes, **second}

    @override
    def settings(self, index: Mapping[str, Any]) -> dict[str, str]:
        said = {name: index[name] for name in ("boundary_ratio", "expand_timesteps") if index.get(name)}
        return {"transformer": f"{said}{bool(self.accepts)}"} if said else {}

    @override
    def standard(self, folder: ModelFolder) -> Params:
        shape = Shape.of(folder)
        second: Params = {} if shape.boundary is None else {SECOND: None}
        return {**super().standard(folder), "negative_prompt": "", **second}

    @override
    def limits(self, folder: ModelFolder, defaults: Params) -> MediaLimits:
        shape = Shape.of(folder)
        if shape.pictured != (bool(self.accepts) and not shape.expand):
            wants = "a picture, and its class is not" if shape.pictured else "no picture, and its class is"
            raise ConfigError(f"model {folder.path}: the transformer takes {wants} for image to video")
        return shape.limits(defaults)

    @override
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        """Raises ConfigError when serving.json goes further than the transformer."""
        shape = Shape.of(folder)
        shape.need_room(limits)
        embeds = limits.max_sequence_length * shape.text_dim * widths["text_encoder"]
        return (text_stage({"prompt_embeds": embeds}, "guidance_scale"),)


FAMILY = Wan()


ENCODED_FRAMES = 4  # what AutoencoderKLWan encodes at a time after the first frame, always; it drops a rest


class WanPicture(PictureEncoder):
    """CLIP's image encoder, where there is one, and the VAE; an ImageEncoder."""

    beside: Sequence[str] = (LAST_FRAME,)

    def __init__(self, loader: Loader) -> None:
        sees = any(loader.folder.index().get("image_encoder") or ())
        self._clip = (loader.plain("image_processor"), loader.model("image_encoder")) if sees else None
        self._vae, self._shape = WanVae(loader), Shape.of(loader.folder)

    @override
    def verify(self, params: Params) -> None:
        """Raise PermanentError for a size that does not fit."""
        self._shape.latents(params)

    def encode(self, pictures: Mapping[str, Sequence[Image]], params: Params) -> dict[str, Tensor]:
        """The `condition` for the denoiser, and where the model sees pictures `image_embeds`, each a row a picture."""
        condition = {"condition": self._condition(pictures, params)}
        if self._clip is None:
            return condition
        processor, encoder = self._clip
        in_rows = [one for row in zip(*pictures.values(), strict=True) for one in row]
        pixels = processor(images=in_rows, return_tensors="pt").to(self._vae.device)
        seen = encoder(**pixels, output_hidden_states=True).hidden_states[-2]
        return {"image_embeds": seen.unflatten(0, (-1, 2)) if LAST_FRAME in pictures else seen, **condition}

    def _condition(self, pictures: Mapping[str, Sequence[Image]], params: Params) -> Tensor:
        """Float32 latents, of the first frame alone or of it, grey, and the last frame if there is one, behind a mask
        that is 1 where pictures are. The mask says so of each frame in the groups that latents are of.
        """
        import torch
        from diffusers.video_processor import VideoProcessor

        vae, temporal, spatial = self._vae.vae, self._shape.temporal, self._shape.spatial
        _, _, groups, rows, columns = self._shape.latents(params)
        size = {"height": rows * spatial, "width": columns * spatial}
        processor = VideoProcessor(vae_scale_factor=spatial)
        given = {name: processor.preprocess(list(of), **size) for name, of in pictures.items()}
        first, last = given[UPLOAD], given.get(LAST_FRAME)
        video = first.new_zeros(
            *first.shape[:2], 1 if self._shape.first else (groups - 1) * temporal + 1, *first.shape[2:]
        )
        video[:, :, 0] = first
        if last is not None:
            video[:, :, -1] = last
        latents = vae.encode(video.to(self._vae.device, vae.dtype)).latent_dist.mode().float()
        mean, scale = norm(vae, latents)
        normed: Tensor = (latents - mean) * scale
        if self._shape.first:
            return normed
        mask = latents.new_zeros(len(first), temporal, groups, rows, columns)
        mask[:, :, 0] = 1
        if last is not None:
            mask[:, -1, -1] = 1
        return torch.cat([mask, normed], dim=1)


class WanImage(Wan):
    """The stages of a WanImageToVideoPipeline folder; text and picture are encoded side by side."""

    source = ("pipelines/wan/pipeline_wan_i2v.py", "WanImageToVideoPipeline")
    classes = Wan.classes | {
        "image_encoder": ("transformers", ("CLIPVisionModel", "CLIPVisionModelWithProjection")),
        "image_processor": ("transformers", ("CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil")),
    }
    image_encoder = WanPicture
    accepts = (START_PICTURE,)

    @override
    def card(self, name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
        card = super().card(name, folder, dtype)
        return replace(card, accepts=(*card.accepts, *_last_frame(Shape.of(ModelFolder(folder)))))

    @override
    def components(self, folder: ModelFolder) -> dict[str, tuple[str, str]]:
        """What was called Fast when it was saved has lost that word since."""
        found = super().components(folder)
        renamed = {part: (found[part][0], found[part][1].removesuffix("Fast")) for part in found if "image" in part}
        return found | renamed

    @override
    def served(self, index: Mapping[str, Any]) -> Mapping[str, tuple[str, tuple[str, ...]]]:
        """CLIP's two parts go together."""
        found = super().served(index)
        sees = any(index.get("image_encoder") or ())
        return {part: known for part, known in found.items() if sees or not part.startswith("image")}

    @override
    def settings(self, index: Mapping[str, Any]) -> dict[str, str]:
        """A first frame alone is encoded otherwise by an equal VAE."""
        found = super().settings(index)
        return {**found, "vae": "first frame"} if index.get("expand_timesteps") else found

    @override
    def limits(self, folder: ModelFolder, defaults: Params) -> MediaLimits:
        limits = super().limits(folder, defaults)
        return structs.replace(limits, frame_multiple=lcm(limits.frame_multiple, ENCODED_FRAMES))

    @override
    def spreads(self, folder: ModelFolder) -> dict[str, dict[str, int]]:
        """Of a picture, what CLIP does by weights, and what the VAE does by tiles; texts have no tiles to share."""
        ways = {IMAGE_ENCODE.kind: {"tensor": 0}} | super().spreads(folder)
        return {kind: ways[kind] | ({"tiles": 0} if kind.endswith("_encode") else {}) for kind in ways}

    @override
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        shape, sees = Shape.of(folder), [part for part in self.components(folder) if part.startswith("image")]
        if shape.image_dim is not None and not sees:
            raise ConfigError(
                f"model {folder.path}: the transformer takes CLIP's embeddings, and there is no image_encoder"
            )
        channels, frames = (shape.channels, limits.max_frames) if shape.first else (shape.condition, shape.temporal)
        embeds = _embeds(folder) * widths["image_encoder"] * (1 + shape.ends) + ALIGNMENT if sees else 0
        picture = replace(
            IMAGE_ENCODE,
            components=(*sees, "vae"),
            outputs=("image_embeds", "condition") if sees else ("condition",),
            room=OutputSize(embeds + ALIGNMENT, channels * LATENT_BYTES / shape.spatial**2, frames),
            reads=("image", *PIXELS, LAST_FRAME),
        )
        return (*super().encoders(folder, limits, widths), picture)


def _last_frame(shape: Shape) -> tuple[AcceptedInput, ...]:
    """CLIP's embeddings of both have a place in some transformers, which then need both; others do not see the last."""
    if shape.ends or (shape.pictured and shape.image_dim is None):
        return (AcceptedInput(LAST_FRAME, "end", min=int(shape.ends)),)
    return ()


def _embeds(folder: ModelFolder) -> int:
    """Numbers that CLIP makes of a picture."""
    clip = folder.config("image_encoder")
    with folder.reading("image_encoder"):
        return ((int(clip["image_size"]) // int(clip["patch_size"])) ** 2 + 1) * int(clip["hidden_size"])


IMAGE_TO_VIDEO = WanImage()
