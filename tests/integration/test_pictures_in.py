"""Videos that end with a picture too, and pictures of several, through `serve` as it comes: the pixels of diffusers."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.pictures import digest, undivided
from tests.models.conftest import draw_pictures
from tools import tiny_whole
from tools.server import Server, computes_of, environment, serving, unfuse
from tools.tiny import SERVING, build
from unfuse.client import Client
from unfuse.core.errors import InvalidParameter

pytestmark = pytest.mark.nightly

SPLIT, WHOLE = ("wan-image", "wan-image-last", "wan-2.2-image", "klein", "flux", "kontext"), ("klein-kv",)
PLAIN = {"prompt": "it turns", "seed": 3, "guidance_scale": 3.0}
FRAMES = {**PLAIN, "num_frames": 5, "image": "sky.png"}
VIDEOS: list[dict[str, Any]] = [
    {**FRAMES, "model": "wan-image-last", "last_image": "wall.jpg"},
    {**FRAMES, "model": "wan-image-last", "last_image": "glass.webp", "seed": 4},
    {**FRAMES, "model": "wan-2.2-image", "last_image": "wall.jpg"},
    {**FRAMES, "model": "wan-2.2-image"},
]
SEEN: list[dict[str, Any]] = [
    {**PLAIN, "model": "klein"},
    {**PLAIN, "model": "klein", "image": ["wall.jpg"]},
    {**PLAIN, "model": "klein", "image": ["wall.jpg", "sea.png"]},
    {**PLAIN, "model": "klein", "image": ["sea.png", "wall.jpg"]},
    {"prompt": "a ring", "seed": 1, "model": "klein-kv"},
    {"prompt": "a ring", "seed": 1, "model": "klein-kv", "image": ["sea.png", "wall.jpg", "sea.png"]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    draw_pictures(root)
    for kind in SPLIT:
        build(kind, root / kind)
    for kind in WHOLE:
        tiny_whole.build(kind, root / kind)
    return root


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[str]]:
    found = undivided(Path(), folder, [{**SERVING, **case} for case in VIDEOS + SEEN])
    assert len({tuple(one) for one in found}) == len(found)
    return found


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = [argument for kind in SPLIT + WHOLE for argument in (str(folder / kind), "--served-model-name", kind)]
    with serving(tmp_path_factory.mktemp("serve"), *models, "--arena", "128MiB") as server:
        yield server.ready()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def files_of(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What `unfuse.Client` is given for a case."""
    given = {name: value for name, value in case.items() if name not in ("image", "last_image")}
    several = [case["image"]] if isinstance(case.get("image"), str) else case.get("image")
    given |= {"image": [folder / one for one in several]} if several else {}
    return given | ({"last_frame": folder / case["last_image"]} if "last_image" in case else {})


def made(server: Server, request: str) -> list[str]:
    view = server.finished(request)
    assert view["status"] == "completed", view["error"]
    return [digest(server.result(request, place)) for place in range(len(view["result"]))]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_openai_videos_with_first_and_last_frame_match_diffusers(
    server: Server, client: openai.OpenAI, folder: Path, expected: list[list[str]]
) -> None:
    """It has no argument for a last frame, which goes as a data URL beside the others."""
    found = []
    for case in VIDEOS:
        fields = {name: str(case[name]) for name in ("seed", "guidance_scale", "num_frames")} | {"output_format": "png"}
        if "last_image" in case:
            data = base64.b64encode((folder / case["last_image"]).read_bytes()).decode()
            fields |= {"last_frame": f"data:image/png;base64,{data}"}
        video = client.videos.create(
            model=case["model"],
            prompt=case["prompt"],
            size="32x32",
            input_reference=folder / case["image"],
            extra_body=fields,
        )  # type: ignore[call-overload]  # sizes of its own
        found.append(made(server, video.id))

    assert found == expected[: len(VIDEOS)]


def test_edits_of_several_images_match_diffusers(
    server: Server, client: openai.OpenAI, folder: Path, expected: list[list[str]]
) -> None:
    found = []
    for case in SEEN:
        own = {"model": case["model"], "prompt": case["prompt"], "size": "32x32"}
        extra = {name: str(case[name]) for name in ("seed", "guidance_scale") if name in case}
        if "image" in case:
            reply = client.images.edit(**own, image=[folder / one for one in case["image"]], extra_body=extra)
        else:
            reply = client.images.generate(**own, extra_body=extra)
        found.append(made(server, (reply.model_extra or {})["id"]))

    assert found == expected[len(VIDEOS) :]
    views = server.get("/v1/requests?limit=6")["data"]
    split = [view for view in views if view["model"] == "klein"]
    stages = [sorted(stage["name"].partition(".")[0] for stage in view["stages"]) for view in split]
    assert stages == [["denoise", "image_encode", "text_encode", "vae_decode"]] * 3 + [
        ["denoise", "text_encode", "vae_decode"]
    ]


def test_concurrent_image_inputs_are_identical_after_compute_crashes(
    server: Server, folder: Path, expected: list[list[str]]
) -> None:
    """Given videos with a last frame and without, and pictures of none, one and several, all in one loop."""
    cases = [*zip(VIDEOS + SEEN, expected, strict=True)] * 2
    with Client(server.url) as u:
        given = [{"size": "32x32", "cache": False, **files_of(case, folder)} for case, _ in cases]
        frames = [{"video": True, "output_format": "png"} if "num_frames" in one else {} for one in given]
        requests = [u.submit(**one, **more) for one, more in zip(given, frames, strict=True)]
        for compute in computes_of(*(worker["pid"] for worker in server.get("/v1/workers")["data"])):
            compute.kill()

    assert [made(server, request.id) for request in requests] == [digests for _, digests in cases]


def test_generate_cli_accepts_a_last_frame_and_several_images(
    server: Server, folder: Path, tmp_path: Path, expected: list[list[str]]
) -> None:
    asked = [
        *unfuse("generate"),
        "it turns",
        "--seed",
        "3",
        "--guidance",
        "3",
        "--size",
        "32x32",
        "--server",
        server.url,
    ]
    film = ["--model", "wan-image-last", "--frames", "5", "-o", "out-%04d.png"]
    film += ["--image", str(folder / "sky.png"), "--last-frame", str(folder / "wall.jpg")]
    seen = [
        "--model",
        "klein",
        "-o",
        "two.png",
        "--image",
        str(folder / "wall.jpg"),
        "--image",
        str(folder / "sea.png"),
    ]
    for more in (film, seen):
        subprocess.run([*asked, *more], cwd=tmp_path, env=environment(tmp_path), check=True)

    assert [digest((tmp_path / f"out-{place:04d}.png").read_bytes()) for place in range(5)] == expected[0]
    assert [digest((tmp_path / "two.png").read_bytes())] == expected[len(VIDEOS) + 2]


def test_models_list_reports_the_supported_image_inputs(server: Server) -> None:
    said = {
        one["id"]: (one["takes_image"], one["references"], one["last_frame"])
        for one in server.get("/v1/models")["data"]
    }
    assert said == {
        "wan-image": (True, 0, ""),
        "wan-image-last": (True, 0, "must"),
        "wan-2.2-image": (True, 0, "may"),
        "klein": (False, 8, ""),
        "klein-kv": (False, 8, ""),
        "flux": (False, 0, ""),
        "kontext": (True, 0, ""),
    }


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "none of two": ({"model": "wan-image-last"}, "last_frame", "between two pictures: send the last one as last_frame"),
    "no picture of one": (
        {"model": "wan-image", "last_frame": "wall.jpg"},
        "last_frame",
        "cannot end with a last_frame; wan-2.2-image, wan-image-last can",
    ),
    "one frame": (
        {"model": "wan-2.2-image", "last_frame": "wall.jpg", "num_frames": 1},
        "num_frames",
        "greater than 1",
    ),
    "no picture": ({"model": "wan-2.2-image", "last_frame": b"nothing"}, "last_frame", "last_frame is not a PNG"),
    "two of a video": (
        {"model": "wan-2.2-image", "image": ["sky.png"] * 2},
        "input_reference",
        "from 2 pictures; no served model can",
    ),
    "two of one": (
        {"model": "kontext", "video": False, "image": ["sky.png"] * 2},
        "image",
        "cannot start from 2 pictures; klein, klein-kv can",
    ),
    "two to redraw": ({"model": "flux", "video": False, "image": ["sky.png"] * 2}, "image", "klein, klein-kv can"),
    "strength": (
        {"model": "klein", "video": False, "image": ["sea.png"], "strength": 0.5},
        "strength",
        "takes no strength",
    ),
    "mask": (
        {"model": "klein", "video": False, "image": ["sky.png"], "mask": "hole.png"},
        "mask",
        "cannot use a mask; flux can",
    ),
    "last frame of a picture": (
        {"model": "wan-2.2-image", "video": False, "last_frame": "wall.jpg"},
        "last_frame",
        "unknown parameter",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_unsupported_image_inputs_are_rejected_before_queueing(name: str, server: Server, folder: Path) -> None:
    asked, param, says = BAD[name]
    given: dict[str, Any] = {"video": True, "image": ["sky.png"], **asked}
    files = {key: given.pop(key) for key in ("mask", "last_frame") if key in given}
    sent = {key: one if isinstance(one, bytes) else folder / one for key, one in files.items()}
    before = len(server.get("/v1/requests")["data"])
    with Client(server.url) as u, pytest.raises(InvalidParameter, match=says) as refused:
        u.submit("a", **{**given, "image": [folder / one for one in given["image"]]}, **sent)

    assert refused.value.param == param
    assert len(server.get("/v1/requests")["data"]) == before


def test_too_many_images_are_rejected_and_a_too_small_one_fails(server: Server, folder: Path) -> None:
    with Client(server.url) as u:
        with pytest.raises(InvalidParameter, match="there is nothing|cannot be read: Too many files"):
            u.submit("a", model="klein", image=[folder / "sea.png"] * 9)
        view = server.finished(u.submit("a", model="klein", image=folder / "sky.png").id)
    assert (
        view["status"] == "failed"
        and "the pipeline does not accept a picture: Image too small" in view["error"]["message"]
    )


def test_last_frame_without_a_first_frame_is_rejected(server: Server) -> None:
    with Client(server.url) as u, pytest.raises(InvalidParameter, match="set its first frame as image too"):
        u.submit("a", model="wan-2.2-image", last_frame=b"")
