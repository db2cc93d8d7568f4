"""The noise schedulers of diffusers that denoise stages support."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unfuse.models.declared import scheduler_classes
from unfuse.weights.folder import ModelFolder

EULER = "FlowMatchEulerDiscreteScheduler"
#: Multistep schedulers. They draw no noise between steps, except with the configurations that `draws_noise` finds.
MULTISTEP = ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler", "DEISMultistepScheduler")


def draws_noise(config: Mapping[str, Any]) -> bool:
    """Return whether this configuration makes a deterministic scheduler class draw noise between steps."""
    return bool(config.get("stochastic_sampling")) or str(config.get("algorithm_type")).startswith("sde")


def is_split(folder: ModelFolder, classes: Mapping[str, tuple[str, tuple[str, ...]]]) -> bool:
    """Return whether a family's denoise stage supports the folder's noise scheduler.

    With any other scheduler of diffusers, the model is served undivided: the pipeline itself calls the scheduler.
    Returns True for a class that is not a scheduler of diffusers, which the family then refuses. Also returns True if
    the folder lacks the scheduler's configuration, because it may have the components of other stages only.

    `folder`: the model, whose index names the scheduler's class.
    `classes`: library and known classes of each component of the family.
    """
    entry = folder.index().get("scheduler")
    if "scheduler" not in classes or not isinstance(entry, list) or len(entry) != 2 or entry[0] != "diffusers":
        return True
    if entry[1] in classes["scheduler"][1]:
        return not draws_noise(folder.optional_config("scheduler/scheduler_config.json"))
    return entry[1] not in scheduler_classes()
