"""FastAPI servers for devices that hold one component at a time: encoders, transformer and VAE come in, and go again.

`reload` loads each by `from_pretrained` for every picture; `queued` does so for up to FEW pictures that wait, which it
then makes together; `copied` keeps the modules, and copies their weights in from files mapped to memory; `streamed`
does that too, with a transformer of which one block is there at a time.
`python -m uvicorn bench.peers.with_swapping:reload`
"""

from __future__ import annotations

import asyncio
import io
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from fastapi import FastAPI, Response
from PIL import Image
from pydantic import BaseModel
from safetensors.torch import load_file

FEW = 4
ENCODERS = "text_encoder", "text_encoder_2"
OTHERS = "tokenizer", "tokenizer_2", "scheduler"


class Asked(BaseModel):
    prompt: str
    seed: int
    call: dict[str, int]


class Components(ABC):
    """Where components come from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def here(self, *names: str) -> Any:
        """A context in which there is a pipeline with these components, and no others."""


class Reloaded(Components):
    """As the docs of diffusers have it where memory is short."""

    @contextmanager
    def here(self, *names: str) -> Iterator[diffusers.FluxPipeline]:
        others = dict.fromkeys({*ENCODERS, "transformer", "vae"} - {*names})
        yield diffusers.FluxPipeline.from_pretrained(self.folder, **others)


class Copied(Components):
    """Modules that are kept without weights."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.whole = diffusers.FluxPipeline.from_pretrained(folder)
        self.kept = {name: self.whole.components[name] for name in (*ENCODERS, "transformer", "vae")}
        self.weights = {name: weights_of(module, folder / name) for name, module in self.kept.items()}
        for module in self.kept.values():
            drop(module)

    @contextmanager
    def here(self, *names: str) -> Iterator[diffusers.FluxPipeline]:
        others = {name: self.whole.components[name] for name in OTHERS}
        absent = dict.fromkeys({*self.kept} - {*names})
        for name in names:
            self.bring(name)
        yield diffusers.FluxPipeline(**others, **absent, **{name: self.kept[name] for name in names})
        for name in names:
            drop(self.kept[name])

    def bring(self, name: str) -> None:
        fill(self.kept[name], self.weights[name])


class Streamed(Copied):
    """Blocks of the transformer come when they are called, and go when they have answered."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        transformer, self.inside = self.kept["transformer"], set[str]()
        for lists in ("transformer_blocks", "single_transformer_blocks"):
            for number, block in enumerate(getattr(transformer, lists)):
                beginning = f"{lists}.{number}."
                own = {
                    name.removeprefix(beginning): tensor
                    for name, tensor in self.weights["transformer"].items()
                    if name.startswith(beginning)
                }
                self.inside |= {beginning + name for name in own}
                block.register_forward_pre_hook(lambda block, _, own=own: fill(block, own))
                block.register_forward_hook(lambda block, *_: drop(block))

    def bring(self, name: str) -> None:
        inside = self.inside if name == "transformer" else set[str]()
        fill(self.kept[name], {key: tensor for key, tensor in self.weights[name].items() if key not in inside})


def weights_of(module: torch.nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Parameters by name, mapped from their files; several names may have one tensor."""
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    same = {id(parameter): stored[name] for name, parameter in module.named_parameters() if name in stored}
    return {name: same[id(parameter)] for name, parameter in module.named_parameters(remove_duplicate=False)}


def fill(module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in weights.items():
        module.get_parameter(name).data = tensor.clone()


def drop(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = torch.empty(0)


@torch.no_grad()
def pictures(components: Components, asked: list[Asked]) -> list[bytes]:
    """One PNG each, made together."""
    call = dict(asked[0].call)
    length = call.pop("max_sequence_length")
    with components.here(*ENCODERS) as pipeline:
        embeds, pooled, _ = pipeline.encode_prompt([one.prompt for one in asked], None, max_sequence_length=length)
        del pipeline
    with components.here("transformer") as pipeline:
        pipeline.set_progress_bar_config(disable=True)
        latents = pipeline(
            prompt_embeds=embeds,
            pooled_prompt_embeds=pooled,
            output_type="latent",
            generator=[torch.Generator("cpu").manual_seed(one.seed) for one in asked],
            **call,
        ).images
        del pipeline
    with components.here("vae") as pipeline:
        vae = pipeline.vae
        grid = pipeline._unpack_latents(latents, call["height"], call["width"], pipeline.vae_scale_factor)
        made = vae.decode(grid / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
        made = pipeline.image_processor.postprocess(made, output_type="np")
        del pipeline, vae
    files = []
    for pixels in (made * 255).round().astype("uint8"):
        Image.fromarray(pixels).save(file := io.BytesIO(), "PNG", compress_level=1)
        files.append(file.getvalue())
    return files


def server(bring: Callable[[Path], Components], together: int = 1) -> FastAPI:
    """An app whose one thread makes up to so many pictures at once, of those that wait."""
    waiting: queue.SimpleQueue[tuple[Asked, Callable[[bytes], None]]] = queue.SimpleQueue()

    def work() -> None:
        torch.set_num_threads(int(os.environ["BENCH_THREADS"]))
        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()
        components = bring(Path(os.environ["BENCH_MODEL"]))
        while True:
            group = [waiting.get()]
            while len(group) < together and not waiting.empty():
                group.append(waiting.get())
            for (_, answer), file in zip(group, pictures(components, [one for one, _ in group]), strict=True):
                answer(file)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        threading.Thread(target=work, daemon=True).start()
        yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/picture")
    async def picture(asked: Asked) -> Response:
        loop = asyncio.get_running_loop()
        made: asyncio.Future[bytes] = loop.create_future()
        waiting.put((asked, lambda file: loop.call_soon_threadsafe(made.set_result, file)))
        return Response(await made, media_type="image/png")

    return app


reload, queued = server(Reloaded), server(Reloaded, FEW)
copied, streamed = server(Copied), server(Streamed)
