"""Pictures redrawn at a strength, whole or where a mask says, through `serve` as it comes: the pixels of diffusers."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from tests.integration.pictures import digest, undivided
from tests.models.conftest import draw_pictures
from tools.server import Server, computes_of, environment, serving, unfuse
from tools.tiny import SERVING, build
from unfuse.client import Client
from unfuse.core.errors import InvalidParameter

KINDS = ("flux", "sdxl", "wan")
PLAIN = {"prompt": "a red circle", "seed": 3, "num_inference_steps": 6, "image": "sky.png", "guidance_scale": 3.0}
CASES: list[dict[str, Any]] = [
    {**PLAIN, "strength": 0.6},
    {**PLAIN, "strength": 0.35, "seed": 4, "image": "wall.jpg", "size": "48x24"},
    {**PLAIN, "strength": 1.0, "image": "glass.webp", "negative_prompt": "blurred"},
    {**PLAIN, "strength": 0.6, "mask": "hole.png"},
    {**PLAIN, "strength": 1.0, "mask": "hole.png", "size": "48x24"},
]
REDRAWN = [(kind, case) for kind in ("flux", "sdxl") for case in CASES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    draw_pictures(root)
    for kind in KINDS:
        build(kind, root / kind)
        (root / kind / "serving.json").write_text(json.dumps({"defaults": SERVING}))
    return root


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[str]]:
    arguments = []
    for kind, case in REDRAWN:
        width, height = map(int, case.get("size", "32x32").split("x"))
        given = {name: value for name, value in case.items() if name != "size"}
        arguments.append({"model": kind, **SERVING, **given, "width": width, "height": height})
    found = undivided(Path(), folder, arguments)
    assert len({tuple(one) for one in found}) == len(REDRAWN)
    return found


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = [argument for kind in KINDS for argument in (str(folder / kind), "--served-model-name", kind)]
    with serving(tmp_path_factory.mktemp("serve"), *models, "--arena", "64MiB") as server:
        yield server.ready()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def edited(client: openai.OpenAI, folder: Path, kind: str, case: dict[str, Any]) -> Any:
    files = {name: folder / case[name] for name in ("image", "mask") if name in case}
    other = {name: str(value) for name, value in case.items() if name not in ("prompt", "size", "image", "mask")}
    return client.images.edit(
        model=kind, prompt=case["prompt"], size=case.get("size", "32x32"), **files, extra_body=other
    )


def pixels(reply: Any) -> list[str]:
    import base64

    return [digest(base64.b64decode(one.b64_json)) for one in reply.data]


def steps_of(server: Server, reply: Any) -> list[int]:
    view = server.get(f"/v1/requests/{(reply.model_extra or {})['id']}")
    return [stage["steps"] for stage in view["stages"] if stage["name"].startswith("denoise")]


def test_openai_image_edits_match_diffusers_pixels_and_step_counts(
    server: Server, client: openai.OpenAI, folder: Path, expected: list[list[str]]
) -> None:
    replies = [edited(client, folder, kind, case) for kind, case in REDRAWN]

    assert [pixels(reply) for reply in replies] == expected
    assert [steps_of(server, reply) for reply in replies] == [[n] for n in (4, 3, 6, 4, 6, 3, 2, 6, 3, 6)]


def test_request_without_image_has_no_image_encode_stage(server: Server) -> None:
    made, redrawn = (server.get(f"/v1/models/{kind}")["starts_from"] for kind in ("wan", "flux"))
    assert (made, redrawn) == ({}, {"image": 0.6, "mask": 0.6})
    request = server.submit(model="flux", prompt="a ring", seed=1)

    view = server.finished(request)

    assert view["status"] == "completed"
    assert sorted(stage["name"] for stage in view["stages"]) == [
        "denoise.0",
        "text_encode",
        "text_encode_2",
        "vae_decode.0",
    ]


@pytest.mark.nightly
def test_batched_edits_match_solo_bytes_after_compute_kills(server: Server, folder: Path) -> None:
    """Given pictures that are made of a text, redrawn whole, and where a mask says, all in one loop."""
    asked = []
    for n in range(16):
        own = {"prompt": "a ring", "seed": n, "num_inference_steps": 20 + n % 3, "model": "flux", "cache": False}
        picture = {"image": folder / "sky.png", "strength": 0.9} if n % 3 else {}
        asked.append(own | picture | ({"mask": folder / "hole.png"} if n % 3 == 2 else {}))
    with Client(server.url) as u:
        alone = [u.generate(**one).data for one in asked]

        requests = [u.submit(**one) for one in asked]
        assert [request.result().data for request in requests] == alone

        requests = [u.submit(**one) for one in asked]
        for compute in computes_of(*(worker["pid"] for worker in server.get("/v1/workers")["data"])):
            compute.kill()
        assert [request.result().data for request in requests] == alone


def test_image_edits_are_streamed_and_can_be_cancelled(server: Server, client: openai.OpenAI, folder: Path) -> None:
    stream = client.images.edit(
        model="flux",
        prompt="a ring",
        image=folder / "sky.png",
        mask=folder / "hole.png",
        stream=True,
        partial_images=2,
        size="32x32",
        extra_body={"strength": "0.5", "num_inference_steps": "12", "seed": "1"},
    )
    assert [event.type for event in stream][-1] == "image_edit.completed"
    with Client(server.url) as u:
        request = u.submit("a ring", model="flux", image=folder / "sky.png", strength=0.9, num_inference_steps=1000)
        steps = [
            event
            for event in zip(request.events(), range(40), strict=False)
            if event[0].step and event[0].stage == "denoise.0"
        ]
        assert {event.steps for event, _ in steps} == {900}
        request.cancel()
        assert server.finished(request.id)["status"] == "cancelled"


def test_unfuse_generate_with_image_and_mask_matches_diffusers(
    server: Server, folder: Path, tmp_path: Path, expected: list[list[str]]
) -> None:
    for number, more in ((0, []), (3, ["--mask", str(folder / "hole.png")])):
        command = [
            *unfuse("generate"),
            "a red circle",
            "--model",
            "flux",
            "--seed",
            "3",
            "--steps",
            "6",
            "--strength",
            "0.6",
            "--guidance",
            "3",
            "--image",
            str(folder / "sky.png"),
            "--size",
            "32x32",
            *more,
            "-o",
            "out.png",
            "--overwrite",
            "--server",
            server.url,
        ]
        subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), check=True)
        assert digest((tmp_path / "out.png").read_bytes()) == expected[number][0]


def drawn(size: tuple[int, int], mode: str = "RGBA") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, "png")
    return file.getvalue()


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "too strong": ({"strength": "1.5"}, "strength", "0 to 1, not 1.5"),
    "negative": ({"strength": "-0.1"}, "strength", "0 to 1, not -0.1"),
    "no number": ({"strength": "much"}, "strength", "must be a number"),
    "no step": ({"strength": "0.1"}, "strength", "strength 0.1 of 6 steps is less than one step"),
    "nothing": ({"strength": "0"}, "strength", "less than one step"),
    "another size": ({"mask": drawn((40, 35))}, "mask", "mask is 40x35 pixels, but image is 40x36"),
    "no alpha": ({"mask": drawn((40, 36), "RGB")}, "mask", "make it transparent where image is to be edited"),
    "no picture": ({"mask": b"nothing"}, "mask", "not a PNG, JPEG, WebP, GIF, BMP or AVIF picture"),
    "too large": ({"mask": drawn((16_385, 1))}, "mask", "at most 16384 a side"),
    "of text alone": ({"model": "wan", "strength": "0.5"}, "image", "cannot start from a picture; flux, sdxl can"),
    "mask of text alone": ({"model": "wan", "mask": drawn((40, 36))}, "mask", "cannot use a mask; flux, sdxl can"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_edit_returns_400_and_queues_nothing(
    name: str, server: Server, client: openai.OpenAI, folder: Path
) -> None:
    more, param, says = BAD[name]
    fields = {name: value for name, value in more.items() if name not in ("mask", "model")}
    masks = {"mask": ("mask.png", more["mask"])} if "mask" in more else {}
    before = len(server.get("/v1/requests")["data"])

    with pytest.raises(openai.BadRequestError, match=says) as caught:
        client.images.edit(
            model=more.get("model", "flux"),
            prompt="a ring",
            image=folder / "sky.png",
            **masks,
            extra_body={"num_inference_steps": "6", **fields},
        )

    assert caught.value.param == param
    assert len(server.get("/v1/requests")["data"]) == before


@pytest.mark.parametrize(("kind", "says"), [("flux", "send it as image"), ("wan", "takes no strength")])
def test_strength_or_mask_without_image_is_rejected(
    kind: str, says: str, server: Server, client: openai.OpenAI, folder: Path
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        client.images.generate(model=kind, prompt="a ring", extra_body={"strength": 0.5})
    assert caught.value.param == "strength"
    with Client(server.url) as u, pytest.raises(InvalidParameter, match="set image too"):
        u.submit("a ring", model="flux", mask=folder / "hole.png")
