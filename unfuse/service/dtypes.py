"""The dtype of each component, by `--dtype` and the devices of workers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import roles_of
from unfuse.models.float16 import float16_components
from unfuse.planning.placement import Device, WorkerPlan, devices_of, is_cpu_only
from unfuse.weights.folder import ModelFolder, parse_dtypes


class GpuRoles(msgspec.Struct, frozen=True):
    """The roles that may run on GPUs."""

    #: All of them.
    all: frozenset[str] = frozenset()

    #: Those of them that may run on a GPU that does not compute in bfloat16.
    without_bfloat16: frozenset[str] = frozenset()


def roles_on_gpus(roles: Iterable[str], wanted: WorkerPlan, devices: Sequence[Device]) -> GpuRoles:
    """Return which of these roles may run on GPUs, and on GPUs without bfloat16."""
    roles = list(roles)
    old_gpus = {device.name for device in devices if not device.has_bfloat16}
    on_gpu, without_bfloat16 = set[str](), set[str]()
    for worker in wanted.worker_counts(roles):
        allowed = devices_of(worker, wanted, devices)
        worker_roles = roles_of(worker) or {*roles}
        if not is_cpu_only(allowed):
            on_gpu |= worker_roles
        if any(name in old_gpus for names in allowed for name in names.split("+")):
            without_bfloat16 |= worker_roles
    return GpuRoles(frozenset(on_gpu), frozenset(without_bfloat16))


def explicit_dtypes(model_spec: ModelSpec, dtype_spec: str, gpu_roles: GpuRoles, files: ModelFolder) -> dict[str, str]:
    """Return the dtype of each component of a model.

    `dtype_spec`: the value of `--dtype`. "auto" is float32 for VAEs and on CPUs, and bfloat16 on GPUs. On GPUs without
    bfloat16 it is float16, and float32 for components that are not known to compute in float16.
    `files`: the model's files, which have the classes of its components.

    The gateway and the workers must get the same result, because pools are named by dtypes.
    """
    default, explicit = parse_dtypes(dtype_spec)
    dtypes = dict.fromkeys(model_spec.dtypes, "float32" if default == "auto" else default)
    if default == "auto":
        dtypes |= dict.fromkeys(_components(model_spec, gpu_roles.all), "bfloat16")
        if gpu_roles.without_bfloat16:
            classes = {name: files.class_of(name) for name in dtypes if files.tensors(name)}
            dtypes |= dict.fromkeys(_components(model_spec, gpu_roles.without_bfloat16), "float32")
            dtypes |= dict.fromkeys(float16_components(model_spec, classes, gpu_roles.without_bfloat16), "float16")
    return dtypes | {name: dtype for name, dtype in explicit.items() if name in dtypes}


def _components(model_spec: ModelSpec, roles: Collection[str]) -> list[str]:
    """Return the components of these roles, without VAEs."""
    stages = (stage for stage in model_spec.pipeline.stages if stage.role in roles)
    return [name for stage in stages for name in stage.components if not name.startswith("vae")]
