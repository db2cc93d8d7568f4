"""Model cards: what the gateway and the scheduler know of a model without loading it."""

from __future__ import annotations

from typing import Literal

import msgspec

from unfuse.core.media import UPLOAD
from unfuse.core.plan import Choice, Params, Pipeline, pool_name
from unfuse.core.vision import Vision
from unfuse.core.vocabulary import Vocabulary


class AcceptedInput(msgspec.Struct, frozen=True):
    """How many uploads of a name a request for a model brings, and what they are for.

    A result starts from a picture (`start`), redraws it (`redraw`), or ends with it (`end`); a `reference` is only
    seen. `strength` is the usual one of what is redrawn. A parameter with a `max` of 0 is refused.
    """

    name: str
    mode: Literal["start", "redraw", "reference", "end"] = "start"
    min: int = 0
    max: int = 1
    strength: float = 0.0


START_PICTURE = AcceptedInput(UPLOAD, min=1)
"""The input of a model that always starts from a picture."""


class ModelCard(msgspec.Struct, frozen=True):
    """A served model: its pipeline, limits, defaults, and what identifies the weights of each component.

    `limits` maps names of a medium's limits to values. `source` is the folder or hub name that workers load the model
    from. `weights` and `dtypes` are by component name. `takes_lora`: a request may name an adapter. `quality` maps a
    quality's name to the parameters that it stands for; a name that is missing changes nothing. `accepts` lists the
    uploads of requests, and those of its medium's parameters that the model refuses. `undivided` says why it is one
    stage ("": it is not). `vision` is what a language model makes of pictures (None: it sees none).
    `follows_picture`: without a size, a result has the shape of its start picture. `picture_scale` is for pipelines
    that take no size: their results are so many times as large as the start picture (0: the pipeline takes a size).
    `vocabulary` is for models that know few words: requests whose prompts have other words get a hint.
    """

    name: str
    source: str
    family: str
    pipeline: Pipeline
    limits: dict[str, int | float]
    defaults: Params
    weights: dict[str, str]
    dtypes: dict[str, str]
    created: int = 0
    takes_lora: bool = False
    quality: dict[str, Params] = {}
    accepts: tuple[AcceptedInput, ...] = ()
    undivided: str = ""
    vision: Vision | None = None
    follows_picture: bool = True
    picture_scale: int = 0
    vocabulary: Vocabulary | None = None

    def accepted(self, upload: str) -> AcceptedInput:
        """How many uploads of this name a request may bring, and what for."""
        return next((one for one in self.accepts if one.name == upload), AcceptedInput(upload, max=0))

    @property
    def strengths(self) -> dict[str, float]:
        """The usual strength with each upload that lets a picture be redrawn."""
        return {one.name: one.strength for one in self.accepts if one.mode == "redraw"}

    def pools(self, choice: Choice | None = None) -> dict[str, str]:
        """The declared pool of each stage, by stage name; of all stages, or of those that `choice` takes."""
        return {
            stage.name: pool_name(stage, self.weights, self.dtypes)
            for stage in self.pipeline.stages
            if choice is None or choice.takes(stage)
        }
