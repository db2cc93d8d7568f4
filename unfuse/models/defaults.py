"""Defaults and limits of requests, from serving.json or else from diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from unfuse.core.errors import ConfigError
from unfuse.core.modalities import MediaLimits, nearest_size
from unfuse.core.model_spec import PromptVocabulary
from unfuse.core.plan import Params
from unfuse.stages.base import need
from unfuse.weights.folder import SERVING

Read = TypeVar("Read", bound=msgspec.Struct)
Quality = Literal["low", "medium", "standard", "high", "hd"]


class RequestDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Default parameters of a model for images or videos. UNSET: serving.json has no default."""

    #: Height of an image or frame, in pixels.
    height: int | UnsetType = UNSET
    #: Width of an image or frame, in pixels.
    width: int | UnsetType = UNSET
    #: Frames of a video.
    num_frames: int | UnsetType = UNSET
    #: Denoising steps.
    num_inference_steps: int | UnsetType = UNSET
    #: Scale of classifier-free guidance or, for a guidance-distilled model, an input of the transformer.
    guidance_scale: float | UnsetType = UNSET
    #: Guidance scale of the second transformer (Wan 2.2).
    guidance_scale_2: float | UnsetType = UNSET
    #: Scale of classifier-free guidance where `guidance_scale` is an input of the transformer.
    true_cfg_scale: float | UnsetType = UNSET
    #: Tokens of a prompt.
    max_sequence_length: int | UnsetType = UNSET
    #: The prompt to guide away from.
    negative_prompt: str | UnsetType = UNSET
    #: The share of the steps that redraw an uploaded image, from 0 to 1.
    strength: float | UnsetType = UNSET
    #: Frames per second of a video.
    fps: int | UnsetType = UNSET


class TextRequestDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Default parameters of a language model. UNSET: serving.json has no default."""

    #: Most tokens of an answer, for requests that set no maximum.
    max_tokens: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    #: Sampling temperature. 0: greedy.
    temperature: Annotated[float, Meta(ge=0, le=2)] | UnsetType = UNSET
    #: Probability mass of the likeliest tokens that are sampled from. 1: all tokens.
    top_p: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
    #: Number of the likeliest tokens that are sampled from. 0 or -1: all tokens.
    top_k: Annotated[int, Meta(ge=-1)] | UnsetType = UNSET
    #: Least probability of a token, relative to the likeliest one. 0: all tokens.
    min_p: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
    #: Penalty for tokens that occurred before. 1: none.
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | UnsetType = UNSET


class ServingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of serving.json in a model's folder, next to model_index.json.

    Every field is optional.
    """

    #: Default parameters.
    defaults: RequestDefaults = RequestDefaults()
    #: Limits that replace those of the model's configuration, by name of a field of MediaLimits.
    limits: dict[str, int | float] = {}
    #: Parameters for each quality that a client may request, such as {"low": {"num_inference_steps": 8}}.
    quality: dict[Quality, RequestDefaults] = {}
    #: The words that a model with few words knows. A request with others gets a hint.
    vocabulary: PromptVocabulary | None = None

    def with_standard(self, standard: Params) -> Params:
        """Return these defaults, with those of `standard` for parameters that have none here."""
        return {**standard, **msgspec.to_builtins(self.defaults)}

    def with_limits(self, limits: MediaLimits, standard: Params) -> Params:
        """Return these defaults, and those of `standard`, moved within the limits, for other parameters.

        Raises ConfigError if serving.json's own defaults are outside the limits.
        """
        defaults = self.with_standard(fit(limits, standard))
        for name, nearest in fit(limits, defaults).items():
            if defaults[name] != nearest:
                raise ConfigError(f"{SERVING}: default {name} {defaults[name]} exceeds the limits, use {nearest}")
        return defaults

    def bounds(self, derived: MediaLimits) -> MediaLimits:
        """Return these limits, completed by those derived from the model's configuration.

        Raises ConfigError for a limit that is unknown, of another type, or beyond the model's.
        """
        known = MediaLimits.__struct_fields__
        if unknown := sorted(set(self.limits) - set(known)):
            raise ConfigError(f"{SERVING}: unknown limit {unknown[0]!r}; known are {', '.join(known)}")
        try:
            limits = msgspec.convert({**msgspec.structs.asdict(derived), **self.limits}, MediaLimits)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{SERVING}: limits: {error}") from error

        for name in ("size_multiple", "frame_multiple"):
            limit, needed = getattr(limits, name), getattr(derived, name)
            if limit <= 0 or limit % needed:
                raise ConfigError(f"{SERVING}: limit {name} must be a multiple of the model's {needed}, not {limit}")
        return msgspec.structs.replace(limits, max_pixels=min(limits.max_pixels, limits.max_size**2))


class TextServingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of serving.json in the folder of a language model. Every field is optional."""

    #: Default parameters.
    defaults: TextRequestDefaults = TextRequestDefaults()
    #: Limits that are lower than those of the model's configuration, by name of a field of TextLimits.
    limits: dict[str, int | float] = {}


def read_serving(folder: Path, kind: type[Read]) -> Read:
    """Return the folder's serving.json; empty if it does not exist.

    Raises ConfigError if it is not valid.
    """
    file = folder / SERVING
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return kind()
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid: {error}") from error


def fit(limits: MediaLimits, defaults: Params) -> Params:
    """Return these defaults with size and length moved within the limits.

    The size becomes the nearest allowed one. The length, in frames, is reduced if it is not allowed.
    """
    width, height, frames = (need(defaults, name, int) for name in ("width", "height", "num_frames"))
    width, height = nearest_size(limits, width, height)
    frames = max(1, min(frames, limits.max_frames))
    return {**defaults, "width": width, "height": height, "num_frames": frames - (frames - 1) % limits.frame_multiple}
