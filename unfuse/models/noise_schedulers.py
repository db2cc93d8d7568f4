"""Checks of noise schedulers: whether they draw noise between steps, and whether a pipeline can use them."""

from __future__ import annotations

import ast
import copy
import inspect
import re
import textwrap
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unfuse.weights.folder import ModelFolder

EULER = "FlowMatchEulerDiscreteScheduler"
MULTISTEP = ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler", "DEISMultistepScheduler")
"""Multistep schedulers. They draw no noise between steps, except with the configurations that `draws_noise` finds."""

READ_ERRORS = (
    OSError, ValueError, TypeError, RuntimeError, LookupError, AttributeError, ArithmeticError, AssertionError,
    ImportError,
)  # fmt: skip
"""Exceptions that classes raise for configurations and files that they cannot read."""


@cache
def scheduler_classes() -> frozenset[str]:
    """Return the names of diffusers' noise schedulers. They are read from its source, because importing needs torch."""
    spec = find_spec("diffusers")
    folder = Path(spec.origin or "").parent / "schedulers" if spec else Path()
    source = "".join(file.read_text() for file in folder.rglob("scheduling_*.py"))
    return frozenset(re.findall(r"^class (\w+Scheduler)\(", source, re.MULTILINE))


def draws_noise(config: Mapping[str, Any]) -> bool:
    """Return whether this configuration makes a deterministic scheduler class draw noise between steps."""
    return bool(config.get("stochastic_sampling")) or str(config.get("algorithm_type")).startswith("sde")


SCHEDULER_CONFIG = "scheduler/scheduler_config.json"


def is_split(folder: ModelFolder, classes: Mapping[str, tuple[str, tuple[str, ...]]]) -> bool:
    """Return whether a family's denoise stage supports the folder's noise scheduler.

    With any other scheduler of diffusers, the model is served undivided: the pipeline itself calls the scheduler. For
    a class that is not a scheduler of diffusers this returns True, and the family refuses it. A folder without the
    scheduler's configuration has the components of other stages alone.

    Args:
        folder: the model, whose index names the scheduler's class.
        classes: library and known classes of each component of the family.
    """
    entry = folder.index().get("scheduler")
    if "scheduler" not in classes or not isinstance(entry, list) or len(entry) != 2 or entry[0] != "diffusers":
        return True
    if entry[1] in classes["scheduler"][1]:
        return not draws_noise(folder.beside(SCHEDULER_CONFIG))
    return entry[1] not in scheduler_classes()


def unreadable_field(kind: Any, config: Mapping[str, Any]) -> str:
    """Return the field of a configuration because of which its class cannot be instantiated; "" if not a single one.

    It is the field without which (with its default value) the class can be instantiated.
    """
    known = inspect.signature(kind.__init__).parameters
    given = {name: value for name, value in config.items() if name in known}
    for name in given:
        try:
            kind(**{other: value for other, value in given.items() if other != name})
        except READ_ERRORS:
            continue
        return name
    return ""


ALWAYS_USED = frozenset({"init_noise_sigma", "order", "scale_model_input", "set_begin_index", "step"})
"""Attributes of a noise scheduler that a pipeline uses in every call, if it uses them at all."""


def misfit(pipeline: Any) -> str:
    """Return why diffusers' pipeline would fail with its noise scheduler, as a sentence; "" if it may work.

    The used attributes and arguments are found in the pipeline's source. Uses that depend on a request are not checked.
    """
    scheduler = getattr(pipeline, "scheduler", None)
    if scheduler is None:
        return ""
    source = inspect.getsource(type(pipeline))
    guarded = re.findall(r"hasattr\(\s*self\.scheduler,\s*\"(\w+)\"", source)
    used = ALWAYS_USED & {*re.findall(r"self\.scheduler\.(\w+)", source)} - {*guarded}
    who, what = type(pipeline).__name__, type(scheduler).__name__
    for name in sorted(used):
        if not hasattr(scheduler, name):
            return f"{who} uses {name} of its noise scheduler, which {what} does not have"
    taken = {*inspect.signature(scheduler.set_timesteps).parameters}
    if "stage_index" in taken and "stage_index" not in source:
        return f"{what} needs a pipeline with stages (stage_index), which {who} does not have"
    given = _always_given(pipeline.__call__)
    if "use_flow_sigmas" in source and scheduler.config.get("use_flow_sigmas"):
        given.discard("sigmas")
    for name in sorted(given - taken):
        return f"{who} passes {name} to its noise scheduler, which {what} with this configuration does not accept"
    if not given or (error := _rejection(scheduler, given)) is None:
        return ""
    if "mu" in given and _rejection(scheduler, given - {"mu"}) is None:
        return f"{who} passes a shift (mu) to its noise scheduler, for which {what} needs use_dynamic_shifting"
    return f"{who} passes {' and '.join(sorted(given))} to its noise scheduler, which {what} rejects ({error!r})"


def _rejection(scheduler: Any, given: set[str]) -> Exception | None:
    """Return the error that a noise scheduler raises for such arguments (`sigmas`, `mu`); None if it accepts them.

    `sigmas` are tried as an array and as a list, since pipelines pass either. A shift (`mu`) is also given to a
    scheduler that requires one. Its configuration may have fields that belong to other classes.
    """
    import numpy as np

    takes_shift = "mu" in inspect.signature(scheduler.set_timesteps).parameters
    shifts = takes_shift and scheduler.config.get("use_dynamic_shifting")
    mu = {"mu": 0.5} if "mu" in given or shifts else {}
    sigmas = np.linspace(1.0, 0.25, 4)
    tried: list[dict[str, Any]] = [{"num_inference_steps": 4}]
    if "sigmas" in given:
        tried = [{"sigmas": sigmas}, {"sigmas": sigmas.tolist()}]
    found: Exception | None = None
    for arguments in tried:
        try:
            copy.deepcopy(scheduler).set_timesteps(**arguments, **mu)
        except READ_ERRORS as error:
            found = error
        else:
            return None
    return found


def _always_given(call: Any) -> set[str]:
    """Return which of `sigmas` and `mu` a pipeline's call passes to its noise scheduler in every request."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(call)))).body
    assert isinstance(function, ast.FunctionDef)
    targets = [target for one in function.body if isinstance(one, ast.Assign) for target in one.targets]
    assigned = {target.id for target in targets if isinstance(target, ast.Name)}
    calls = [one for one in ast.walk(function) if isinstance(one, ast.Call)]
    keywords = [word for one in calls if ast.unparse(one.func) == "retrieve_timesteps" for word in one.keywords]
    named = {str(word.arg) for word in keywords if isinstance(word.value, ast.Name) and word.value.id in assigned}
    return named & {"sigmas", "mu"}
