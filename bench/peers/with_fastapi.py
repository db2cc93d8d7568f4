"""FastAPI and a diffusers pipeline in each of uvicorn's processes, which is what its docs have.

`python -m uvicorn bench.peers.with_fastapi:app --workers 2`: https://fastapi.tiangolo.com/deployment/server-workers/
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Response
from pydantic import BaseModel

from bench.peers.pipeline import load, pictures

state: dict[str, Any] = {}
one_at_a_time = threading.Lock()


class Asked(BaseModel):
    prompt: str
    seed: int
    call: dict[str, int]


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    state["pipeline"] = load()
    yield


app = FastAPI(lifespan=lifespan)


@app.post("/picture")
def picture(asked: Asked) -> Response:
    """A plain function runs in a thread, so that the loop goes on; a pipeline is not for several threads."""
    with one_at_a_time:
        (made,) = pictures(state["pipeline"], [asked.prompt], [asked.seed], **asked.call)
    return Response(made, media_type="image/png")
