"""Several pictures in one request, and the last frame of a video: who takes them, what is kept, what is refused."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from msgspec import structs

from tests.server.served import Served, picture, serve
from tools.cards import IDLE, MOVING, card
from unfuse.core.model_spec import START_IMAGE, AcceptedInput
from unfuse.queues.base import RequestFilter

EDITS, VIDEOS = "/v1/images/edits", "/v1/videos"
SEEING = structs.replace(card("test/seeing"), accepts=(AcceptedInput("image", "reference", max=3),))
BETWEEN = structs.replace(card("test/between"), accepts=(START_IMAGE, AcceptedInput("last_frame", "end", min=1)))
ENDING = structs.replace(card("test/ending"), accepts=(START_IMAGE, AcceptedInput("last_frame", "end")))


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Nobody works for what is asked here, so whatever is accepted stays."""
    cards = (SEEING, BETWEEN, ENDING, MOVING, IDLE)
    with serve(tmp_path_factory.mktemp("gallery"), cards=cards) as running:
        yield running


@pytest.fixture
def http(gallery: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=gallery.url, timeout=60, trust_env=False) as client:
        yield client


def send(http: httpx2.Client, model: str, *files: tuple[str, int], url: str = EDITS, **fields: Any) -> httpx2.Response:
    """Pictures are named by what is on them."""
    sent = [(name, (name, picture(shown))) for name, shown in files]
    asked = {"model": model, "prompt": "a ring", "seed": "1", **fields}
    return http.post(url, data=asked, files=sent, headers={"prefer": "respond-async"})


def kept(gallery: Served, response: httpx2.Response) -> dict[str, bytes]:
    """The uploads of a request that was accepted, of which it has the hashes."""
    assert response.status_code == 202, response.text
    context = gallery.run(gallery.queue.load(response.json()["id"])).context
    found = {name: gallery.results.attached(context.id, name) for name in context.request.derived.image_hashes}
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}
    assert hashes == context.request.derived.image_hashes
    return found


def test_input_images_are_stored_in_order(gallery: Served, http: httpx2.Client) -> None:
    two = send(http, SEEING.name, ("image[]", 1), ("image[]", 2))
    three = send(http, SEEING.name, ("image", 3), ("image", 2), ("image", 3))

    assert kept(gallery, two) == {"image": picture(1), "image_2": picture(2)}
    assert kept(gallery, three) == {"image": picture(3), "image_2": picture(2), "image_3": picture(3)}
    assert kept(gallery, send(http, SEEING.name, ("image", 1))) == {"image": picture(1)}


def test_optional_reference_images_may_be_omitted(gallery: Served, http: httpx2.Client) -> None:
    asked = {"model": SEEING.name, "prompt": "a ring"}
    response = http.post("/v1/images/generations", json=asked, headers={"prefer": "respond-async"})
    assert kept(gallery, response) == {}


@pytest.mark.parametrize("model", [BETWEEN.name, ENDING.name])
def test_last_frame_is_stored_beside_the_first_frame(model: str, gallery: Served, http: httpx2.Client) -> None:
    films = {"url": VIDEOS, "num_frames": "5"}
    response = send(http, model, ("input_reference", 1), ("last_frame", 2), **films)
    assert kept(gallery, response) == {"image": picture(1), "last_frame": picture(2)}


REFUSED: dict[str, tuple[str, list[tuple[str, int]], dict[str, Any], str, str]] = {
    "too many": (SEEING.name, [("image", 1)] * 4, {}, "image", "cannot start from 4 pictures; no served model"),
    "of one": (MOVING.name, [("image", 1)] * 2, {}, "image", "cannot start from 2 pictures; test/seeing can"),
    "of none": (IDLE.name, [("image", 1)], {}, "image", "; test/between, test/ending, test/moving, test/seeing can"),
    "no end": (BETWEEN.name, [("input_reference", 1)], {"url": VIDEOS}, "last_frame", "the last one as last_frame"),
    "no beginning": (BETWEEN.name, [("last_frame", 1)], {"url": VIDEOS}, "input_reference", "needs a picture to start"),
    "no such end": (
        MOVING.name,
        [("input_reference", 1), ("last_frame", 1)],
        {"url": VIDEOS},
        "last_frame",
        "cannot end with a last_frame; test/between, test/ending can",
    ),
    "one frame": (
        ENDING.name,
        [("input_reference", 1), ("last_frame", 1)],
        {"url": VIDEOS, "num_frames": "1"},
        "num_frames",
        "num_frames must be greater than 1 with a last_frame",
    ),
    "two ends": (
        ENDING.name,
        [("input_reference", 1), *[("last_frame", 1)] * 2],
        {"url": VIDEOS},
        "last_frame",
        "last_frame must be one picture, not 2",
    ),
    "a picture's end": (SEEING.name, [("image", 1), ("last_frame", 1)], {}, "last_frame", "unknown parameter"),
    "redrawn": (SEEING.name, [("image", 1)], {"strength": "0.5"}, "strength", "takes no strength"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_input_images_return_400_naming_the_field(name: str, gallery: Served, http: httpx2.Client) -> None:
    model, files, fields, param, says = REFUSED[name]
    before = len(gallery.run(gallery.queue.list(RequestFilter(), limit=1000)))

    response = send(http, model, *files, **fields)

    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], says in error["message"]) == (param, True), error
    assert len(gallery.run(gallery.queue.list(RequestFilter(), limit=1000))) == before


def test_invalid_image_among_several_is_reported_by_its_field(http: httpx2.Client) -> None:
    for bad in ("image", "last_frame"):
        model, url, field = (
            (SEEING.name, EDITS, "image") if bad == "image" else (ENDING.name, VIDEOS, "input_reference")
        )
        files = [(field, ("a", picture(1))), (bad, ("b", b"no picture"))]
        response = http.post(url, data={"model": model, "prompt": "a"}, files=files)
        assert response.status_code == 400 and response.json()["error"]["param"] == bad, response.text


def test_models_endpoint_reports_references_and_last_frame_support(http: httpx2.Client) -> None:
    said = {one["id"]: (one["references"], one["last_frame"]) for one in http.get("/v1/models").json()["data"]}
    assert [said[one.name] for one in (SEEING, BETWEEN, ENDING, MOVING)] == [(3, ""), (0, "must"), (0, "may"), (0, "")]


def form(*parts: tuple[str, bytes], charset: str = "") -> dict[str, Any]:
    """A form as a browser writes it; each part has its head behind `form-data; name=`."""
    head = "--limit\r\ncontent-disposition: form-data; name="
    body = b"".join(f"{head}{named}\r\n\r\n".encode() + value + b"\r\n" for named, value in parts)
    kind = f"multipart/form-data; boundary=limit{charset}"
    return {"content": body + b"--limit--\r\n", "headers": {"content-type": kind, "prefer": "respond-async"}}


SHOWN = ('"image"; filename="a.png"\r\ncontent-type: image/png', picture(1))
ASKED = (('"model"', SEEING.name.encode()), ('"prompt"', b"a ring"))


def test_empty_html_form_fields_are_ignored(gallery: Served, http: httpx2.Client) -> None:
    empty = [(f'"{name}"', b"") for name in ("size", "seed", "n", "quality", "user", "stream", "negative_prompt")]
    mask = ('"mask"; filename=""\r\ncontent-type: application/octet-stream', b"")

    answer = http.post(EDITS, **form(*ASKED, SHOWN, *empty, mask))

    assert kept(gallery, answer) == {"image": picture(1)}
    assert answer.json()["params"]["negative_prompt"] == ""


def test_empty_required_or_unknown_form_fields_return_400(http: httpx2.Client) -> None:
    missing = ('"image"; filename=""\r\ncontent-type: application/octet-stream', b"")
    named = ('"image"; filename="blob"\r\ncontent-type: image/png', b"")
    for parts, says in (
        ((*ASKED, missing), "image is missing"),
        ((*ASKED, named), "image must have 1 to"),
        ((*ASKED[:1], ('"prompt"', b""), SHOWN), "prompt must be 1 to"),
        ((*ASKED, SHOWN, ('"colour"', b"")), "unknown parameter 'colour'"),
    ):
        answer = http.post(EDITS, **form(*parts))
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]


def test_numbered_image_fields_are_ordered_by_number(gallery: Served, http: httpx2.Client) -> None:
    answer = send(http, SEEING.name, ("image[10]", 3), ("image[0]", 1), ("image[2]", 2))
    assert kept(gallery, answer) == {"image": picture(1), "image_2": picture(2), "image_3": picture(3)}


@pytest.mark.parametrize("charset", ["undefined", "punycode", "idna"])
def test_form_with_an_unusable_charset_returns_202_or_400(http: httpx2.Client, charset: str) -> None:
    answer = http.post(EDITS, **form(*ASKED, ('"user"', b"\xff.-\xfe"), SHOWN, charset=f"; charset={charset}"))
    assert answer.status_code in (202, 400), answer.text


def test_ten_megabyte_image_is_accepted_as_json(gallery: Served, http: httpx2.Client) -> None:
    """Ten megabytes, as of a phone's camera."""
    large = picture(1) + bytes(10_000_000)
    shown = {"image_url": f"data:image/png;base64,{base64.b64encode(large).decode()}"}
    asked = {"model": SEEING.name, "prompt": "a ring", "images": [shown]}
    assert kept(gallery, http.post(EDITS, json=asked, headers={"prefer": "respond-async"})) == {"image": large}
