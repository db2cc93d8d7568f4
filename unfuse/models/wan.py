"""Wan: text to picture and text to video with one text encoder, a video transformer and a causal video VAE.

The stages do what diffusers' WanPipeline does, in its order of operations, on its components. A picture is a video of
one frame. Checked against diffusers 0.42.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfuse.core.card import Limits, ModelCard
from unfuse.core.errors import ConfigError
from unfuse.core.object_ref import ALIGNMENT, DTYPES
from unfuse.core.plan import Params, Pipeline, Room, StageSpec
from unfuse.models.base import Family, Loader, Report, choose_dtype, weights_ids
from unfuse.models.defaults import Serving, call_defaults
from unfuse.models.folder import INDEX, ModelFolder
from unfuse.stages.base import Stage, need

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from unfuse.stages.denoise import NoiseScheduler

SOURCE = ("pipelines/wan/pipeline_wan.py", "WanPipeline")

TOKENIZERS = ("T5TokenizerFast", "T5Tokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")
SCHEDULERS = ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler")
CLASSES: dict[str, tuple[str, tuple[str, ...]]] = {
    "tokenizer": ("transformers", TOKENIZERS),
    "text_encoder": ("transformers", ("UMT5EncoderModel",)),
    "transformer": ("diffusers", ("WanTransformer3DModel",)),
    "scheduler": ("diffusers", SCHEDULERS),
    "vae": ("diffusers", ("AutoencoderKLWan",)),
}
"""Library and known classes of each component."""

PIXEL_MULTIPLE = 16
"""WanPipeline refuses other sizes, whatever the VAE."""

FPS = 16
"""What the published models were trained at."""

LATENT_BYTES = DTYPES["float32"]


@dataclass(frozen=True)
class Shape:
    """Sizes that follow from a model's configurations, and the latents they give a request."""

    channels: int
    text_dim: int
    spatial: int
    temporal: int
    patch: tuple[int, int, int]
    longest: int
    """Most patches along one axis that the rotary embedding has room for."""

    @classmethod
    def of(cls, folder: ModelFolder) -> Shape:
        """Read the configurations of transformer and VAE. Raises ConfigError when they do not fit each other."""
        transformer, vae = folder.config("transformer"), folder.config("vae")
        try:
            frames, rows, columns = transformer["patch_size"]
            shape = cls(
                int(transformer["in_channels"]), int(transformer["text_dim"]),
                int(vae["scale_factor_spatial"]), int(vae["scale_factor_temporal"]),
                (int(frames), int(rows), int(columns)), int(transformer["rope_max_seq_len"]),
            )  # fmt: skip
            channels = int(vae["z_dim"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"model {folder.path}: transformer or vae configuration: {error!r}") from error
        if channels != shape.channels:
            raise ConfigError(f"model {folder.path}: the VAE has {channels} channels, the transformer {shape.channels}")
        return shape

    def latents(self, params: Params) -> tuple[int, ...]:
        """(1, channels, frames, height, width) of a request's latents, its sizes rounded as WanPipeline rounds them."""
        frames = need(params, "num_frames", int)
        if frames % self.temporal != 1:
            frames = frames // self.temporal * self.temporal + 1
        rows, columns = self.spatial * self.patch[1], self.spatial * self.patch[2]
        return (
            1,
            self.channels,
            (max(frames, 1) - 1) // self.temporal + 1,
            need(params, "height", int) // rows * self.patch[1],
            need(params, "width", int) // columns * self.patch[2],
        )

    def limits(self, defaults: Params) -> Limits:
        """What can be asked for, as far as the configurations say: twice the default length of a video at most."""
        multiple = lcm(PIXEL_MULTIPLE, self.spatial * self.patch[1], self.spatial * self.patch[2])
        longest = min(self.patch[1:]) * self.spatial * self.longest
        return Limits(
            size_multiple=multiple,
            min_size=multiple,
            max_size=min(Limits().max_size, longest // multiple * multiple),
            max_frames=min(2 * need(defaults, "num_frames", int) - 1, self._most_frames()),
            frame_multiple=self.temporal,
            max_sequence_length=need(defaults, "max_sequence_length", int),
        )

    def need_room(self, limits: Limits) -> None:
        """Raise ConfigError when the rotary embedding ends before the limits do."""
        longest = min(self.patch[1:]) * self.spatial * self.longest
        if limits.max_size > longest or limits.max_frames > self._most_frames():
            most = f"{longest} pixels and {self._most_frames()} frames"
            raise ConfigError(f"serving.json: the transformer's rope_max_seq_len allows {most}; lower the limits")

    def _most_frames(self) -> int:
        return (self.longest * self.patch[0] - 1) * self.temporal + 1


class Wan(Family):
    """Text encoding, denoising and VAE decoding of a WanPipeline folder."""

    def card(self, name: str, folder: Path, dtype: str = "auto") -> ModelCard:
        """See Family. The VAE computes in float32 whatever the dtype, as its makers advise: half precision shows."""
        model = ModelFolder(folder)
        _classes(model)
        shape, serving = Shape.of(model), Serving.read(folder)
        standard = {"fps": FPS, "negative_prompt": "", **call_defaults(*SOURCE)}
        limits = serving.bounds(shape.limits(serving.over(standard)))
        shape.need_room(limits)
        dtypes = {**dict.fromkeys(CLASSES, choose_dtype(dtype)), "vae": "float32"}
        pipeline = _pipeline(shape, limits, DTYPES[dtypes["text_encoder"]])
        return ModelCard(
            name=name,
            source=str(folder),
            family="wan",
            pipeline=pipeline,
            limits=limits,
            defaults=serving.within(limits, standard),
            weights=weights_ids(model, pipeline),
            dtypes=dtypes,
            created=int((folder / INDEX).stat().st_mtime),
        )

    def load(
        self, spec: StageSpec, folder: Path, device: str, dtypes: Mapping[str, str], report: Report | None = None
    ) -> Stage:
        """See Family. The denoiser reads the VAE's configuration too, for its scale factors, but not its weights."""
        model = ModelFolder(folder)
        classes = _classes(model)
        loader = Loader(model, device, dtypes, report)
        if spec.kind == "text_encode":
            return _text_encode(loader, classes)
        if spec.kind == "denoise":
            return _denoise(loader, classes)
        if spec.kind == "vae_decode":
            return _vae_decode(loader, classes)
        raise ConfigError(f"model {folder} has no stage of kind {spec.kind}")


FAMILY = Wan()


def _classes(folder: ModelFolder) -> dict[str, str]:
    """The class of each component. Raises ConfigError for what this family cannot run yet."""
    index = folder.index()
    if any(index.get("transformer_2") or ()) or index.get("boundary_ratio") is not None:
        raise ConfigError(f"model {folder.path} denoises with two transformers (Wan 2.2), which is not served yet")
    if index.get("expand_timesteps"):
        raise ConfigError(f"model {folder.path} has a timestep for each token (Wan 2.2 5B), which is not served yet")
    found: dict[str, str] = {}
    for component, (library, known) in CLASSES.items():
        entry = index.get(component)
        if not isinstance(entry, list) or len(entry) != 2 or entry[0] != library or entry[1] not in known:
            raise ConfigError(
                f"model {folder.path}: {INDEX} gives component {component} as {entry}; "
                f"served is {library} {' or '.join(known)}"
            )
        found[component] = entry[1]
    return found


def _pipeline(shape: Shape, limits: Limits, text_bytes: int) -> Pipeline:
    embeds = limits.max_sequence_length * shape.text_dim * text_bytes
    per_pixel = shape.channels * LATENT_BYTES / shape.spatial**2
    return Pipeline((
        StageSpec(
            "text_encode", "text_encode", ("text_encoder", "tokenizer"),
            outputs=("prompt_embeds", "negative_prompt_embeds"),
            room=Room(fixed=2 * (embeds + ALIGNMENT)),
        ),
        StageSpec(
            "denoise", "denoise", ("transformer", "scheduler"),
            inputs=("prompt_embeds", "negative_prompt_embeds"), outputs=("latents",), per_sample=True,
            room=Room(ALIGNMENT, per_pixel, shape.temporal),
        ),
        StageSpec("vae_decode", "vae_decode", ("vae",), inputs=("latents",), per_sample=True),
    ))  # fmt: skip


def _text_encode(loader: Loader, classes: Mapping[str, str]) -> Stage:
    from unfuse.stages.text_encode import TextEncode

    tokenizer = loader.plain("tokenizer", "transformers", classes["tokenizer"])
    encoder = loader.model("text_encoder", "transformers", classes["text_encoder"])
    return TextEncode(WanText(tokenizer, encoder))


def _denoise(loader: Loader, classes: Mapping[str, str]) -> Stage:
    from unfuse.stages.denoise import Denoise

    scheduler = loader.plain("scheduler", "diffusers", classes["scheduler"])
    if scheduler.config.get("stochastic_sampling"):
        raise ConfigError(f"model {loader.folder.path}: a scheduler with stochastic_sampling has no seed of its own")
    transformer = loader.model("transformer", "diffusers", classes["transformer"])
    return Denoise(WanDenoiser(transformer, scheduler, Shape.of(loader.folder)))


def _vae_decode(loader: Loader, classes: Mapping[str, str]) -> Stage:
    from unfuse.stages.vae_decode import VaeDecode

    return VaeDecode(WanVae(loader.model("vae", "diffusers", classes["vae"])))


class WanText:
    """Tokenizer and text encoder; `encode` is a TextEncoder's."""

    def __init__(self, tokenizer: Any, encoder: Any) -> None:
        self._tokenizer, self._encoder = tokenizer, encoder

    def encode(self, text: str, length: int) -> dict[str, Tensor]:
        """`prompt_embeds` (1, length, text dim); behind the text's own tokens they are zero."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        tokens = self._tokenizer(
            [prompt_clean(text)],
            padding="max_length",
            max_length=length,
            truncation=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        device = self._encoder.device
        mask = tokens.attention_mask.to(device)
        hidden = self._encoder(tokens.input_ids.to(device), mask).last_hidden_state
        embeds = hidden.new_zeros(hidden.shape, dtype=self._encoder.dtype)
        used = int(mask.sum())
        embeds[:, :used] = hidden[:, :used]
        return {"prompt_embeds": embeds}


class WanDenoiser:
    """Transformer and the configuration of its noise scheduler; a Denoiser."""

    def __init__(self, transformer: Any, scheduler: Any, shape: Shape) -> None:
        self._transformer, self._scheduler, self._shape = transformer, scheduler, shape
        self.device: torch.device = transformer.device
        self.dtype: torch.dtype = transformer.dtype
        self.embeds = {"prompt_embeds": (1, None, shape.text_dim)}

    def latent_shape(self, params: Params) -> tuple[int, ...]:
        """(1, channels, frames, height, width)."""
        return self._shape.latents(params)

    def noise_scheduler(self) -> NoiseScheduler:
        """A new one of the same configuration."""
        fresh: NoiseScheduler = type(self._scheduler).from_config(self._scheduler.config)
        return fresh

    def predict(self, latents: Tensor, timestep: Tensor, embeds: Mapping[str, Tensor]) -> Tensor:
        """The velocity, shaped as the latents."""
        velocity: Tensor = self._transformer(
            hidden_states=latents,
            timestep=timestep.expand(latents.shape[0]),
            encoder_hidden_states=embeds["prompt_embeds"],
            return_dict=False,
        )[0]
        return velocity


class WanVae:
    """The VAE; a VaeDecoder."""

    def __init__(self, vae: Any) -> None:
        self._vae = vae
        self.latents = (1, int(vae.config.z_dim), None, None, None)

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels of latents that were normalised per channel. It divides by 1/std: times std rounds differently."""
        import torch

        latents = latents.to(self._vae.device, self._vae.dtype)
        mean, deviation = (
            torch.tensor(values).view(1, -1, 1, 1, 1).to(latents)
            for values in (self._vae.config.latents_mean, self._vae.config.latents_std)
        )
        pixels: Tensor = self._vae.decode(latents / (1.0 / deviation) + mean, return_dict=False)[0]
        return pixels
