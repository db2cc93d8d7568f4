"""What is in a cluster once the operator has acted on what the chart made."""

from __future__ import annotations

from base64 import b64encode

from tests.k8s.server import SCHEMAS, completed
from tools.helm import Made, Object
from unfuse.k8s import objects
from unfuse.k8s.spec import pools, read_spec

EVERY = frozenset({objects.KEDA, objects.MONITORING})


def operated(chart: Made, apis: frozenset[str] = EVERY) -> Made:
    """The chart's objects and the operator's, in a cluster that has these APIs too."""
    (name, body), *_ = chart.of("DiffusionPipeline").items()
    pipeline = read_spec(completed(body, SCHEMAS["diffusionpipelines"]))
    made = [*chart.objects, *map(_stored, objects.secrets_of(name, pipeline))]
    made += objects.pipeline_objects(name, pipeline, apis)
    own = chart.of("DiffusionPool")
    assert own.keys() == pools(name, pipeline).keys(), "the pipeline names the pools that there are"
    for pool, one in own.items():
        spec = read_spec(completed(one, SCHEMAS["diffusionpools"]))
        made += objects.pool_objects(pool, "default", spec, {name: pipeline}, apis)
    return Made(made)


def _stored(secret: Object) -> Object:
    """A Secret as the API server has it."""
    data = {key: b64encode(text.encode()).decode() for key, text in secret["stringData"].items()}
    return {key: value for key, value in secret.items() if key != "stringData"} | {"data": data}
