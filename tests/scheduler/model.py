"""A three-stage model for tests of scheduling: nothing of it is ever loaded."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec.structs import replace

from unfuse.core.modalities import OutputSize
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import Params, Pipeline, Value
from unfuse.core.request import Change, RequestRecord
from unfuse.queues.memory import MemoryQueue
from unfuse.stages.specs import DENOISE as DENOISE_KIND, TEXT_ENCODE, VAE_DECODE

PIPELINE = Pipeline(
    (
        replace(TEXT_ENCODE, components=("text_encoder",), outputs=("embeds",), output_size=OutputSize(100)),
        replace(DENOISE_KIND, components=("transformer",), inputs=("embeds",), output_size=OutputSize(0, 0.5)),
        VAE_DECODE,
    )
)
"""Nothing of it is cached."""

WEIGHTS = {"text_encoder": "e" * 32, "transformer": "d" * 32, "vae": "v" * 32}
CARD = ModelSpec("test/model", "/nowhere", "test", PIPELINE, {}, {}, WEIGHTS, dict.fromkeys(WEIGHTS, "float32"))
SHARING = msgspec.structs.replace(
    CARD,
    pipeline=Pipeline(
        (
            msgspec.structs.replace(PIPELINE.stages[0], depends_on_params=("prompt", "guidance_scale")),
            *PIPELINE.stages[1:],
        )
    ),
)
"""The same model, of which encoder outputs may be cached."""

ENCODE, DENOISE, DECODE = CARD.pools().values()


def params(seed: int = 7, **more: Value) -> Params:
    return {"prompt": "a red circle", "width": 64, "height": 64, "num_frames": 1, "seed": seed, **more}


class Racing(MemoryQueue):
    """Lets every other caller of the same moment load a context before one of them commits."""

    async def load(self, request: str) -> RequestRecord:
        record = await super().load(request)
        await asyncio.sleep(0)
        return record

    async def commit(self, change: Change) -> RequestRecord:
        await asyncio.sleep(0)
        return await super().commit(change)
