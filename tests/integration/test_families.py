"""Models of several families in one server, each stage in a process of its own: the pixels of undivided diffusers."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.comparing import kind_of
from tests.integration.pictures import digest, undivided
from tests.models.conftest import draw_pictures
from tools.server import Server, computes_of, serving
from tools.tiny import SERVING, build

KINDS = (
    "flux",
    "flux-schnell",
    "wan-image",
    "wan",
    "wan-euler",
    "wan-2.2",
    "wan-2.2-image",
    "wan-2.2-5b",
    "wan-2.2-5b-image",
    "hunyuan-video",
    "qwen-image",
    "klein",
    "krea",
    "sdxl",
    "sd3",
    "z-image",
    "ltx",
    "kontext",
)
BY_DAY = ("flux", "flux-schnell", "wan-image", "wan", "hunyuan-video", "klein", "sdxl", "ltx", "kontext")
"""Those that are served by day: two that share encoders and VAEs, two that share encoders, a family of whole blocks,
videos, a U-Net, and pictures of pictures."""


def some_by_day(kinds: Iterable[str], by_day: Container[str] = BY_DAY) -> list[Any]:
    """Return these kinds as parameters of a test. Those that are not served by day are nightly."""
    return [kind if kind in by_day else pytest.param(kind, marks=pytest.mark.nightly) for kind in kinds]


PLAIN = {"prompt": "a red circle", "seed": 3}
CASES: dict[str, list[dict[str, Any]]] = {
    "flux": [
        PLAIN,
        {"prompt": "a blue star", "seed": 4, "size": "48x24", "guidance_scale": 1.5, "num_inference_steps": 6},
        {"prompt": "a ring", "seed": 5, "negative_prompt": "blurred"},
    ],
    "flux-schnell": [PLAIN],
    "wan-image": [
        {**PLAIN, "image": "sky.png", "num_frames": 5},
        {"prompt": "it turns", "seed": 4, "image": "wall.jpg", "num_frames": 9, "size": "48x32"},
        {"prompt": "it turns", "seed": 5, "image": "glass.webp", "num_frames": 1, "guidance_scale": 1.0},
    ],
    "wan": [{**PLAIN, "num_frames": 5}],
    "wan-euler": [{**PLAIN, "num_frames": 1}],
    "wan-2.2": [{**PLAIN, "num_frames": 5, "guidance_scale_2": 2.0}],
    "wan-2.2-image": [{**PLAIN, "image": "sky.png", "num_frames": 5}],
    "wan-2.2-5b": [{**PLAIN, "num_frames": 5}],
    "wan-2.2-5b-image": [{**PLAIN, "image": "wall.jpg", "num_frames": 5, "size": "64x32"}],
    "hunyuan-video": [
        {**PLAIN, "num_frames": 5},
        {"prompt": "it turns", "seed": 4, "num_frames": 9, "size": "48x16", "negative_prompt": "blurred"},
    ],
    "klein": [PLAIN],
    "krea": [{**PLAIN, "negative_prompt": "blurred", "size": "48x24"}],
    "qwen-image": [PLAIN, {"prompt": "a ring", "seed": 5, "negative_prompt": "blurred", "size": "48x24"}],
    "sdxl": [PLAIN, {"prompt": "a ring", "seed": 5, "negative_prompt": "blurred", "size": "48x24"}],
    "sd3": [PLAIN, {"prompt": "a ring", "seed": 5, "negative_prompt": "blurred", "size": "48x24"}],
    "z-image": [PLAIN, {"prompt": "a ring", "seed": 5, "negative_prompt": "blurred", "size": "48x24"}],
    "ltx": [{**PLAIN, "num_frames": 5, "fps": 12}],
    "kontext": [{**PLAIN, "image": "wall.jpg", "size": "64x32"}],
}
TRUE_CFG = {kind: {"true_cfg_scale": 3.0} for kind in ("flux", "hunyuan-video", "qwen-image")}
"""What serving.json sets for some models, so that their negative prompts guide."""
PICTURED = ("kontext",)
"""Those that make a picture of a picture."""


def called(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """What an undivided pipeline is called with for the parameters of a request."""
    if kind == "sdxl":
        return {name: value for name, value in given.items() if name != "max_sequence_length"}
    if kind == "ltx":
        return {**{name: value for name, value in given.items() if name != "fps"}, "frame_rate": given["fps"]}
    return given | ({"max_area": given["width"] * given["height"]} if kind in PICTURED else {})


@pytest.fixture(scope="module")
def kinds(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The kinds of model that are served: all, or those of the day where no nightly test of this file was selected."""
    items = [item for item in request.session.items if item.path == request.path]
    return KINDS if any(item.get_closest_marker("nightly") for item in items) else BY_DAY


@pytest.fixture(scope="module")
def folder(kinds: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    draw_pictures(root)
    for kind in kinds:
        build(kind, root / kind)
    for kind, own in [(kind, own) for kind, own in TRUE_CFG.items() if kind in kinds]:
        (root / kind / "serving.json").write_text(json.dumps({"defaults": SERVING | own}))
    return root


@pytest.fixture(scope="module")
def expected(kinds: tuple[str, ...], folder: Path) -> dict[str, list[list[str]]]:
    """SHA-256 of every frame of every case, by kind of model."""
    arguments, cases = [], [(kind, case) for kind in kinds for case in CASES[kind]]
    for kind, case in cases:
        width, height = map(int, case.get("size", "32x32").split("x"))
        given = {name: value for name, value in case.items() if name != "size"} | {"width": width, "height": height}
        arguments.append({"model": kind, **called(kind, {**SERVING, **TRUE_CFG.get(kind, {}), **given})})
    found: dict[str, list[list[str]]] = {kind: [] for kind in kinds}
    for (kind, _), frames in zip(cases, undivided(Path(), folder, arguments), strict=True):
        found[kind].append(frames)
    return found


@pytest.fixture(scope="module")
def server(kinds: tuple[str, ...], folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    names = [argument for kind in kinds for argument in ("--served-model-name", kind)]
    models = [str(folder / kind) for kind in kinds]
    with serving(tmp_path_factory.mktemp("serve"), *models, *names, "--arena", "64MiB") as server:
        yield server.ready()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def frames(server: Server, request: str) -> list[str]:
    """SHA-256 of the RGB bytes of every picture of a request."""
    shown = server.finished(request)
    assert shown["status"] == "completed", shown["error"]
    files = [server.result(request, place) for place in range(len(shown["result"]))]
    return [digest(file) for file in files]


@pytest.mark.parametrize(
    "kind", some_by_day(["flux", "flux-schnell", "wan-euler", "qwen-image", "klein", "krea", "sdxl", "sd3", "z-image"])
)
def test_images_match_the_undivided_diffusers_pipeline(
    kind: str, server: Server, expected: dict[str, list[list[str]]]
) -> None:
    cases = [{name: value for name, value in case.items() if name != "num_frames"} for case in CASES[kind]]
    requests = [server.submit(model=kind, **case) for case in cases]

    assert [frames(server, request) for request in requests] == expected[kind]


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
@pytest.mark.parametrize("kind", some_by_day(kind for kind, cases in CASES.items() if "num_frames" in cases[0]))
def test_video_frames_match_the_undivided_diffusers_pipeline(
    kind: str, server: Server, client: openai.OpenAI, folder: Path, expected: dict[str, list[list[str]]]
) -> None:
    """As frames, without loss; one frame is a video too."""
    videos = [submitted(kind, case, server, client, folder) for case in CASES[kind]]

    assert [frames(server, video) for video in videos] == expected[kind]


def submitted(kind: str, case: dict[str, Any], server: Server, client: openai.OpenAI, folder: Path) -> str:
    """Ask for a picture, or for a video as pictures without loss; returns the request's id."""
    if kind in PICTURED:
        given = {name: str(value) for name, value in case.items() if name not in ("prompt", "size", "image")}
        reply = client.images.edit(
            model=kind, prompt=case["prompt"], image=folder / case["image"], size=case["size"], extra_body=given
        )
        return str((reply.model_extra or {})["id"])
    if "num_frames" not in case:
        return server.submit(model=kind, **case)
    given = {name: str(value) for name, value in case.items() if name not in ("prompt", "size", "image")}
    picture = {"input_reference": folder / case["image"]} if "image" in case else {}
    video = client.videos.create(
        model=kind,
        prompt=case["prompt"],
        size=case.get("size", "32x32"),
        **picture,
        extra_body={**given, "output_format": "png"},
    )
    return str(video.id)


def test_image_edits_match_the_undivided_diffusers_pipeline(
    server: Server, client: openai.OpenAI, folder: Path, expected: dict[str, list[list[str]]]
) -> None:
    for kind in PICTURED:
        requests = [submitted(kind, case, server, client, folder) for case in CASES[kind]]
        assert [frames(server, request) for request in requests] == expected[kind]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PICTURED])
def test_batched_requests_are_byte_identical_also_after_compute_crashes(
    kind: str, server: Server, client: openai.OpenAI, folder: Path
) -> None:
    """Given requests of other prompts, seeds, steps, scales and pictures, which share forwards, unless the model's
    blocks take requests one by one, then also when the compute processes are killed amid them."""
    usual, cases = CASES[kind][0], []
    steps = 8 if "num_frames" in usual else 24  # so many that tiny pictures are there at one time
    for n in range(16):
        own = {"prompt": f"{usual['prompt']} {'and on ' * (n % 3)}", "seed": n, "num_inference_steps": steps + n % 3}
        own |= {"negative_prompt": "blurred"} if n % 4 == 1 else {}
        own |= {"image": ("sky.png", "wall.jpg", "glass.webp")[n % 3]} if "image" in usual else {}
        cases.append({**usual, **own})
    alone = [frames(server, submitted(kind, case, server, client, folder)) for case in cases]

    requests = [submitted(kind, case, server, client, folder) for case in cases]
    assert [frames(server, request) for request in requests] == alone
    shared = [stage for request in requests for stage in server.get(f"/v1/requests/{request}")["stages"]]
    batches = [stage["batch"] for stage in shared if stage["name"] == "denoise.0"]
    assert max(batches) > 1 or kind in ("klein", "krea"), batches

    requests = [submitted(kind, case, server, client, folder) for case in cases]
    assert any(event["type"] == "progress" for event in server.events(requests[0]))
    for compute in computes_of(*(worker["pid"] for worker in server.get("/v1/workers")["data"])):
        compute.kill()
    assert [frames(server, request) for request in requests] == alone
    again = [server.get(f"/v1/requests/{request}")["stages"] for request in requests]
    assert any(stage["attempt"] > 1 for stages in again for stage in stages)


def test_image_edit_by_a_video_model_matches_a_one_frame_video(
    server: Server, client: openai.OpenAI, folder: Path, expected: dict[str, list[list[str]]]
) -> None:
    case = CASES["wan-image"][2]
    reply = client.images.edit(
        model="wan-image",
        prompt=case["prompt"],
        image=folder / case["image"],
        size="32x32",
        extra_body={"seed": "5", "guidance_scale": "1.0"},
    )

    assert frames(server, reply.model_extra["id"]) == expected["wan-image"][2]


def test_models_with_equal_encoders_and_vaes_share_their_pools(kinds: tuple[str, ...], server: Server) -> None:
    pools = [(kind_of(pool["id"]), sorted(pool["models"])) for pool in server.get("/v1/pools")["data"]]

    def shared(*groups: list[str]) -> list[list[str]]:
        """These groups of models, of those that are served."""
        return sorted(served for group in groups if (served := [kind for kind in group if kind in kinds]))

    flux, alone = ["flux", "flux-schnell"], [["hunyuan-video"], ["klein"], ["krea"], ["qwen-image"]]
    alone += [["ltx"], ["sd3"], ["sdxl"], ["z-image"]]
    wan = [kind for kind in sorted(KINDS) if kind.startswith("wan")]
    small = [[kind] for kind in wan if "5b" in kind]
    large = [kind for kind in wan if "5b" not in kind]
    encoded = shared([*flux, "kontext"], wan, *alone)
    assert sorted(models for kind, models in pools if kind == "text-encode") == encoded
    decoded = shared(flux, large, *small, ["kontext"], *alone)
    assert sorted(models for kind, models in pools if kind == "vae-decode") == decoded
    second = shared([*flux, "kontext"], ["hunyuan-video"], ["sd3"], ["sdxl"])
    assert sorted(models for kind, models in pools if kind == "text-encode-2") == second
    pictured = shared(["klein"], ["kontext"], ["wan-2.2-5b-image"], ["wan-2.2-image"], ["wan-image"])
    assert sorted(models for kind, models in pools if kind == "image-encode") == pictured
    assert sorted(models for kind, models in pools if kind == "denoise") == [[kind] for kind in sorted(kinds)]


def test_denoise_and_decode_of_a_request_run_on_the_same_worker(server: Server) -> None:
    shown = server.finished(server.submit(model="flux", **PLAIN))

    workers = {stage["name"]: stage["worker"] for stage in shown["stages"]}
    assert sorted(workers) == ["denoise.0", "text_encode", "text_encode_2", "vae_decode.0"]
    assert len({*workers.values()}) <= 2  # both encoders may begin at once, each in a worker
    assert workers["denoise.0"] == workers["vae_decode.0"]
