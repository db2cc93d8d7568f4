"""Model cards: what gateway and scheduler know of a model without loading it."""

from __future__ import annotations

import msgspec

from unfuse.core.plan import Choice, Params, Pipeline, pool_name


class ModelCard(msgspec.Struct, frozen=True):
    """A served model: its pipeline, limits, defaults, and what identifies the weights of each component.

    `limits` are by the names that the media have for them. `source` is the folder or hub name its workers load;
    `weights` and `dtypes` are by component name. A model that `takes_image` needs one with each request; one that
    `takes_lora` can be asked for with an adapter. `quality` holds what a quality means, by its name, where it means
    something.
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

    def pools(self, choice: Choice | None = None) -> dict[str, str]:
        """Pool of each stage by stage name, of the chosen ones only (None: all)."""
        return {
            stage.name: pool_name(stage, self.weights, self.dtypes)
            for stage in self.pipeline.stages
            if choice is None or choice.takes(stage)
        }
