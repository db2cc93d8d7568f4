"""Random pipelines, and requests for them."""

from typing import Any

from hypothesis import strategies as st

from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import Pipeline, StageSpec, compile_plan
from unfuse.core.request import GenerationRequest, RequestContext, new_request_id
from unfuse.core.task import Claim, Task
from unfuse.testing.queue_samples import request_context


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Valid pipelines of up to seven stages, in no particular order, with at least one that writes results."""
    stages: list[StageSpec] = []
    values: dict[str, bool] = {}
    for number in range(draw(st.integers(0, 5))):
        inputs, per_sample = _inputs(draw, values)
        outputs = tuple(f"{letter}{number}" for letter in draw(st.sampled_from(["v", "vw"])))
        stages.append(StageSpec(f"stage{number}", "denoise", ("weights",), inputs, outputs, per_sample))
        values |= dict.fromkeys(outputs, per_sample)
    for number in range(draw(st.integers(1, 2))):
        inputs, per_sample = _inputs(draw, values)
        stages.append(StageSpec(f"final{number}", "vae_decode", ("weights",), inputs, (), per_sample))
    return Pipeline(tuple(draw(st.permutations(stages))))


def _inputs(draw: st.DrawFn, values: dict[str, bool]) -> tuple[tuple[str, ...], bool]:
    names = draw(st.lists(st.sampled_from(sorted(values)), max_size=3, unique=True)) if values else []
    return tuple(names), draw(st.booleans()) or any(values[name] for name in names)


def request_for(pipeline: Pipeline, samples: int = 1, **fields: Any) -> RequestContext:
    """A request whose stages wait in two pools, by the parity of their place in the pipeline."""
    pools = {stage.name: f"pool{place % 2}" for place, stage in enumerate(pipeline.stages)}
    plan = compile_plan(pipeline, pools, {"steps": 2}, [{"index": index} for index in range(samples)])
    names = [name for name in GenerationRequest.__struct_fields__ if name in fields]
    asked = {"id": new_request_id(), "model": "m", "params": {"steps": 2}} | {name: fields.pop(name) for name in names}
    return request_context(GenerationRequest(**asked), plan, **fields)


def object_for(task: Task | Claim, name: str = "") -> ObjectRef:
    """The object a stage's attempt made."""
    made = name or f"{task.stage}@{task.attempt}"
    return ObjectRef(made, "w", "node", task.request, task.stage, task.attempt, 1, 0, (), (), b"key", 0.0)
