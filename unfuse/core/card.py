"""Model cards: what gateway and scheduler know of a model without loading it."""

from __future__ import annotations

import msgspec

from unfuse.core.plan import Choice, Params, Pipeline, pool_name


class Limits(msgspec.Struct, frozen=True):
    """What a model can be asked for. Sizes in pixels; `frame_multiple` k allows k·i + 1 frames."""

    size_multiple: int = 16
    min_size: int = 16
    max_size: int = 2048
    max_pixels: int = 2048 * 2048
    max_frames: int = 1
    frame_multiple: int = 4
    max_steps: int = 1000
    max_guidance: float = 100.0
    max_prompt_chars: int = 10_000
    max_sequence_length: int = 512
    max_n: int = 10


class ModelCard(msgspec.Struct, frozen=True):
    """A served model: its pipeline, limits, defaults, and what identifies the weights of each component.

    `source` is the folder or hub name its workers load; `weights` and `dtypes` are by component name. A model that
    `takes_image` needs one with each request; one that `takes_lora` can be asked for with an adapter. `quality` holds
    what a quality means, by its name, where it means something.
    """

    name: str
    source: str
    family: str
    pipeline: Pipeline
    limits: Limits
    defaults: Params
    weights: dict[str, str]
    dtypes: dict[str, str]
    created: int = 0
    takes_image: bool = False
    takes_lora: bool = False
    quality: dict[str, Params] = {}

    @property
    def makes_video(self) -> bool:
        """Whether it can be asked for more than one frame."""
        return self.limits.max_frames > 1

    def pools(self, choice: Choice | None = None) -> dict[str, str]:
        """Pool of each stage by stage name, of the chosen ones only (None: all)."""
        return {
            stage.name: pool_name(stage, self.weights, self.dtypes)
            for stage in self.pipeline.stages
            if choice is None or choice.takes(stage)
        }
