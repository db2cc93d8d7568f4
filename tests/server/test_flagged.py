"""Pictures that a safety checker flags: marked or refused in each form in which results are delivered."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.server.served import NAKED, PICTURES, Served, picture, serve
from unfuse.cli.main import run
from unfuse.client import connect

pytestmark = pytest.mark.row("P21", "K7")

URL = "/v1/images/generations"
ASKED = {"model": PICTURES.name, "prompt": NAKED, "seed": 4, "n": 3}
KEY = {"authorization": "Bearer " + "a" * 40}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("keyed"), keys=("anna " + "a" * 40,)) as served:
        yield served


@pytest.fixture
def http(keyed: Served) -> Iterator[httpx2.Client]:
    """A client without a key."""
    with httpx2.Client(base_url=keyed.url, timeout=60, trust_env=False) as client:
        yield client


def events(http: httpx2.Client, **more: Any) -> list[dict[str, Any]]:
    answer = http.post(URL, json={**ASKED, "stream": True, **more}, headers=KEY)
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]


def require_blocked(answer: httpx2.Response) -> None:
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "moderation_blocked"


def test_flagged_image_is_null_and_marked_among_the_others(http: httpx2.Client) -> None:
    first, second, third = http.post(URL, json=ASKED, headers=KEY).json()["data"]
    assert second == {"seed": 5, "b64_json": None, "flagged": True}
    assert [base64.b64decode(one["b64_json"]) for one in (first, third)] == [picture(4), picture(6)]
    assert [event["b64_json"] is None for event in events(http)] == [False, True, False]


def test_flagged_image_has_no_link_and_its_url_returns_400(http: httpx2.Client) -> None:
    answer = http.post(URL, json={**ASKED, "response_format": "url"}, headers=KEY).json()
    first, second, third = answer["data"]
    assert "url" not in second
    assert [http.get(one["url"]).content for one in (first, third)] == [picture(4), picture(6)]

    results = http.get(f"/v1/requests/{answer['id']}", headers=KEY).json()["result"]
    assert [one.get("flagged", False) for one in results] == [False, True, False]
    require_blocked(http.get(results[1]["url"]))
    require_blocked(http.get(results[1]["url"], headers={"range": "bytes=0-1"}))
    assert http.head(results[1]["url"]).status_code == 400


def test_request_with_only_flagged_images_returns_moderation_blocked(http: httpx2.Client) -> None:
    require_blocked(http.post(URL, json={**ASKED, "seed": 5, "n": 1}, headers=KEY))
    (event,) = events(http, seed=5, n=1)
    assert event["error"]["code"] == "moderation_blocked"
    assert event["error"]["type"] == "image_generation_user_error"


def test_flagged_video_fails_with_moderation_blocked(http: httpx2.Client, keyed: Served) -> None:
    asked = {"model": PICTURES.name, "prompt": NAKED, "seed": 5, "num_frames": 5}
    video = http.post("/v1/videos", json=asked, headers=KEY).json()["id"]
    keyed.next_event(video, "failed")
    shown = http.get(f"/v1/videos/{video}", headers=KEY).json()
    assert (shown["status"], shown["error"]["code"]) == ("failed", "moderation_blocked")
    for query in ("", "?stream=1", "?variant=thumbnail"):
        assert http.get(f"/v1/videos/{video}/content{query}", headers=KEY).status_code == 409


def test_client_saves_unflagged_images_under_their_original_index(keyed: Served, tmp_path: Path) -> None:
    with connect(keyed.url, "a" * 40) as client:
        result = client.generate(NAKED, model=PICTURES.name, seed=4, n=3)
    assert (result.indexes, result.flagged) == ([0, 2], [1])
    saved = result.save(tmp_path / "a.png")
    assert [file.name for file in saved] == ["a-0.png", "a-2.png"]
    assert [file.read_bytes() for file in saved] == [picture(4), picture(6)]


def test_single_unflagged_image_of_several_keeps_its_index(keyed: Served, tmp_path: Path) -> None:
    with connect(keyed.url, "a" * 40) as client:
        result = client.generate(NAKED, model=PICTURES.name, seed=5, n=2)
    assert [file.name for file in result.save(tmp_path / "a.png")] == ["a-1.png"]


def test_cli_reports_images_omitted_by_the_safety_checker(
    keyed: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*arguments: str) -> tuple[str, str]:
        with pytest.raises(SystemExit, match="0"):
            run((*arguments, "--server", keyed.url, "--api-key", "a" * 40))
        output = capsys.readouterr()
        return output.out, output.err

    asked = ("generate", NAKED, "-o", str(tmp_path / "a.png"), "--model", PICTURES.name, "--seed", "4", "-n", "3")
    out, err = told(*asked)
    assert out.splitlines() == [f"{tmp_path}/a-0.png (seed 4)", f"{tmp_path}/a-2.png (seed 6)"]
    assert "picture 1 (seed 5) is left out: the model's safety checker flagged it" in err

    shown = json.loads(told(*asked, "--json")[0])
    assert shown["flagged"] == [1]
    assert "/result/1" in told("requests", "show", shown["id"])[0].partition("(flagged)")[0].splitlines()[-1]
