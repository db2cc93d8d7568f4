"""Model cards: what the gateway and the scheduler know of a model without loading it."""

from __future__ import annotations

from typing import Literal

import msgspec

from unfuse.core.plan import Choice, Params, Pipeline, pool_name
from unfuse.core.vision import Vision
from unfuse.core.vocabulary import Vocabulary


class ModelCard(msgspec.Struct, frozen=True):
    """A served model: its pipeline, limits, defaults, and what identifies the weights of each component.

    `limits` maps names of a medium's limits to values. `source` is the folder or hub name that workers load the model
    from. `weights` and `dtypes` are by component name. `takes_image`: every request must bring a picture. `takes_lora`:
    a request may name an adapter. `quality` maps a quality's name to the parameters that it stands for; a name that is
    missing changes nothing. The model `lacks` some of its medium's parameters: who sends one is refused. `undivided`
    says why it is one stage ("": it is not). `vision` is what a language model makes of pictures (None: it sees none).
    `starts` are uploads that a request may bring, to redraw a picture, each with the strength that is usual with it.
    It may bring so many pictures as `references`, which are seen, not redrawn. `last_frame`: whether a video that
    starts from a picture `may` end with another one, or `must`. `follows_picture`: without a size, a
    result has the shape of its start picture. `picture_scale` is for pipelines that take no size: their results are
    so many times as large as the start picture (0: the pipeline takes a size). `vocabulary` is for models that know few
    words: requests whose prompts have other words get a hint.
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
    takes_image: bool = False
    takes_lora: bool = False
    quality: dict[str, Params] = {}
    lacks: tuple[str, ...] = ()
    undivided: str = ""
    vision: Vision | None = None
    starts: dict[str, float] = {}
    references: int = 0
    last_frame: Literal["", "may", "must"] = ""
    follows_picture: bool = True
    picture_scale: int = 0
    vocabulary: Vocabulary | None = None

    @property
    def most_pictures(self) -> int:
        """How many pictures a request may start from."""
        return max(self.references, int(self.takes_image or bool(self.starts)))

    def pools(self, choice: Choice | None = None) -> dict[str, str]:
        """The declared pool of each stage, by stage name; of all stages, or of those that `choice` takes."""
        return {
            stage.name: pool_name(stage, self.weights, self.dtypes)
            for stage in self.pipeline.stages
            if choice is None or choice.takes(stage)
        }
