"""Pages are followed: their programs and commands are run as they stand there, but for addresses, ids and models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import av
import pytest
from PIL import Image

from tests.integration.test_costs import counted
from tests.smollm2 import smollm
from tools.scripted_model import make_scripted_model
from tools.server import Server, environment, serving, unfuse
from tools.snippets import ROOT, blocks, is_python
from tools.tiny import build
from unfuse.client import connect

__all__ = ["smollm"]

DOCS = ROOT / "docs"
ADDRESS = "http://127.0.0.1:8000"

#: The fields of a new video that depend on the request and the model only.
VIDEO_FACTS = ("object", "model", "prompt", "seconds", "size", "num_frames", "fps", "seed", "output_format", "progress")


def program(text: str, folder: Path, *options: str) -> str:
    """What a Python program prints, in a process of its own. It must end well, and without a word of warning."""
    done = subprocess.run(
        [sys.executable, *options, "-c", text],
        cwd=folder,
        env=environment(folder) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def shell(line: str, folder: Path) -> str:
    done = subprocess.run(["sh", "-c", line], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def command(line: str, folder: Path) -> str:
    """What a command of unfuse prints, without a server's name in the environment."""
    line = line.replace("unfuse", f"{sys.executable} -m unfuse", 1)
    variables = environment(folder) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", line], cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def programs(page: Path, server: Server) -> list[str]:
    return [block.replace(ADDRESS, server.url) for block in blocks(page) if is_python(block)]


def curls(page: Path, server: Server) -> list[str]:
    """The calls of curl in a page, without their prompts, which fail for a response that is an error."""
    text = re.sub(r"\\\n\s*", " ", "\n".join(blocks(page)))
    lines = [line.removeprefix("$ ") for line in text.splitlines()]
    return [
        f"{line.replace(ADDRESS, server.url)} -sS --fail" for line in lines if line.startswith(("curl http", "curl -"))
    ]


def pixels(path: Path) -> bytes:
    return Image.open(path).convert("RGB").tobytes()


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Server]]:
    """The folder of a tiny model of a family that makes pictures, and a server of it."""
    model = build("flux", tmp_path_factory.mktemp("models") / "flux")
    with serving(tmp_path_factory.mktemp("serve"), str(model), "--arena", "64MiB", "--threads", "1") as server:
        yield model, server.ready()


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model that calls the tool of the page about tools, and of the built-in model."""
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    result = '<tool_response>\n{"city": "Rome", "celsius": 21, "sky": "clear"}\n</tool_response>'
    scripts = {
        "What is the weather in Rome?": call,
        result: "It is 21 °C in Rome, and the sky is clear.",
        "What is the capital of France?": "The capital is Paris.",
    }
    model = make_scripted_model(tmp_path_factory.mktemp("models") / "scripted", scripts)
    options = ("--kv", "8MiB", "--arena", "64MiB", "--threads", "1")
    with serving(tmp_path_factory.mktemp("serve"), str(model), *options) as server:
        yield server.ready()


@pytest.mark.nightly
def test_tool_calls_guide_program_calls_the_function_and_prints_the_answer(chats: Server, tmp_path: Path) -> None:
    page = DOCS / "guides" / "tool-calls.md"
    (weather,) = programs(page, chats)
    assert program(weather, tmp_path) in page.read_text()


@pytest.mark.nightly
def test_chats_guide_program_and_commands_print_the_answer(chats: Server, tmp_path: Path) -> None:
    page = DOCS / "guides" / "chats.md"
    lines = [line.replace(ADDRESS, chats.url) for block in blocks(page) for line in block.splitlines()]
    (curl,) = [f"{line} -sS --fail" for line in lines if line.startswith("curl ")]
    (typed,) = [line for line in lines if line.startswith("unfuse chat ")]
    (asked,) = programs(page, chats)
    said = json.loads(shell(curl, tmp_path))["choices"][0]["message"]["content"]
    assert {said, command(typed, tmp_path).strip(), program(asked, tmp_path).strip()} == {"The capital is Paris."}


@pytest.mark.nightly
def test_python_client_guide_programs_run(server: Server, tmp_path: Path) -> None:
    first, follow, cancel, many, full, again = client_programs(server, " as client:", ".local(", ".chat(")
    for text in (first, full):
        program(text, tmp_path)
        assert pixels(tmp_path / "out.png")
    assert " completed " in program(follow, tmp_path) and pixels(tmp_path / "star.png")
    assert program(cancel, tmp_path).strip() in ("cancelled", "completed")
    program(many, tmp_path)
    assert len({pixels(tmp_path / f"circle-{number}.png") for number in range(3)}) == 3
    program(again, tmp_path)
    once = server.get("/v1/requests?limit=1")["data"][0]["id"]
    program(again, tmp_path)
    assert server.get("/v1/requests?limit=1")["data"][0]["id"] == once


@pytest.mark.nightly
def test_python_client_guide_chat_and_local_programs_run(chats: Server, tmp_path: Path) -> None:
    (talk,) = client_programs(chats, '.chat("What')
    assert program(talk, tmp_path) == "The capital is Paris.\nstop\n"
    (local,) = client_programs(chats, ".local(")
    program(local, tmp_path)
    assert pixels(tmp_path / "cross.png")


def client_programs(server: Server, having: str, *without: str) -> list[str]:
    """The programs of the page about the client that contain a text, and none of some others."""
    found = programs(DOCS / "guides" / "python-client.md", server)
    return [text for text in found if having in text and not any(part in text for part in without)]


@pytest.mark.nightly
def test_first_chat_page_commands_and_programs_print_the_capital(smollm: Path, tmp_path: Path) -> None:
    page = DOCS / "start" / "first-chat.md"
    lines = [line.removeprefix("$ ") for block in blocks(page) for line in block.splitlines()]
    alone, asked = [line for line in lines if line.startswith("unfuse chat ")]
    assert command(alone, tmp_path).strip() in page.read_text()
    with serving(tmp_path, "smollm2", "--kv", "512MiB", "--threads", "1") as server:
        server.ready()
        assert command(asked.replace(ADDRESS, server.url), tmp_path) == command(alone, tmp_path)
        (curl,) = [block.replace(ADDRESS, server.url) for block in blocks(page) if "--json '{" in block]
        assert "Paris" in json.loads(shell(f"{curl} -sS --fail", tmp_path))["choices"][0]["message"]["content"]
        once, streamed = programs(page, server)
        assert "Paris" in program(once, tmp_path)
        assert program(streamed, tmp_path) in page.read_text()

        (weather,) = programs(DOCS / "guides" / "tool-calls.md", server)
        must = weather.replace('tool_choice = "auto"\n\n', 'tool_choice = "required"\n\n', 1)
        assert must != weather and "get_weather({'city': 'Rome'}) returned" in program(must, tmp_path)

        (typed,) = programs(DOCS / "guides" / "structured-outputs.md", server)
        greedy = typed.replace("response_format=City", "response_format=City, temperature=0")
        assert "capital='Paris'" in program(greedy, tmp_path)


@pytest.mark.nightly
def test_from_diffusers_howto_script_and_server_make_equal_images(flux: tuple[Path, Server], tmp_path: Path) -> None:
    model, server = flux
    script, client = programs(DOCS / "start" / "from-diffusers.md", server)
    assert len(client.splitlines()) <= 10
    own = json.loads((model / "serving.json").read_text())["defaults"]
    called = ", ".join(f"{name}={value}" for name, value in own.items())  # which a server knows by itself
    assert script.count("num_inference_steps=4") == 1
    program(script.replace("MODEL", str(model)).replace("num_inference_steps=4", called), tmp_path)
    assert "'denoise.0'" in program(client, tmp_path)
    assert pixels(tmp_path / "mine.png") == pixels(tmp_path / "served.png")

    (ask,) = curls(DOCS / "start" / "from-diffusers.md", server)
    (picture,) = json.loads(shell(ask, tmp_path))["data"]
    shell(f"curl -sS --fail -o curled.png {picture['url']}", tmp_path)
    assert pixels(tmp_path / "mine.png") == pixels(tmp_path / "curled.png")

    (compare,) = [block for block in blocks(DOCS / "start" / "from-diffusers.md") if block.startswith("python -c")]
    assert shell(compare.replace("python", sys.executable), tmp_path) == "None\n"


def test_start_page_commands_and_program_run(server: Server, tmp_path: Path) -> None:
    page = DOCS / "start" / "start-a-server.md"
    (ask,) = curls(page, server)
    (picture,) = json.loads(shell(ask, tmp_path))["data"]
    shell(f"curl -sS --fail -o out.png {picture['url']}", tmp_path)
    assert pixels(tmp_path / "out.png")
    (by_openai,) = programs(page, server)
    program(by_openai, tmp_path)
    assert pixels(tmp_path / "ring.png")


def test_async_images_howto_commands_and_programs_run(server: Server, tmp_path: Path) -> None:
    page = DOCS / "guides" / "asynchronous-pictures.md"
    ask, look, follow, fetch = curls(page, server)
    request = json.loads(shell(ask, tmp_path))["id"]
    assert json.loads(shell(look.replace("REQUEST", request), tmp_path))["id"] == request
    assert "event: completed" in shell(follow.replace("REQUEST", request), tmp_path)
    shell(fetch.replace("REQUEST", request), tmp_path)
    assert pixels(tmp_path / "out.png")

    one, many = programs(page, server)
    assert program(one, tmp_path).splitlines()[-1].startswith("completed")
    program(many, tmp_path)
    assert len({pixels(tmp_path / f"out-{number}.png") for number in range(3)}) == 3


def test_videos_howto_commands_and_programs_run(server: Server, tmp_path: Path) -> None:
    """The stream of a video that is read while it is generated, and its file, have the same number of frames."""
    page = DOCS / "guides" / "videos.md"
    ask, look, follow, download, thumbnail, stream = curls(page, server)
    video = json.loads(shell(ask, tmp_path))
    (shown,) = re.findall(r'^{"id":"video_.*}$', page.read_text(), re.MULTILINE)
    expected = json.loads(shown)
    assert video.keys() == expected.keys()
    assert {name: video[name] for name in VIDEO_FACTS} == {name: expected[name] for name in VIDEO_FACTS}

    shell(stream.replace("VIDEO", video["id"]), tmp_path)
    assert "event: completed" in shell(follow.replace("VIDEO", video["id"]), tmp_path)
    assert json.loads(shell(look.replace("VIDEO", video["id"]), tmp_path))["status"] == "completed"
    shell(download.replace("VIDEO", video["id"]), tmp_path)
    shell(thumbnail.replace("VIDEO", video["id"]), tmp_path)
    assert frames(tmp_path / "stream.mp4") == frames(tmp_path / "star.mp4") == video["num_frames"]
    assert len(pixels(tmp_path / "star.webp")) == 128 * 128 * 3

    by_openai, by_unfuse = programs(page, server)
    program(by_openai, tmp_path)
    assert program(by_unfuse, tmp_path).splitlines()[-1].startswith("completed")
    assert [frames(tmp_path / f"{name}.mp4") for name in ("ring", "live", "square")] == [video["num_frames"]] * 3


def frames(path: Path) -> int:
    """The number of frames of a video file."""
    with av.open(str(path)) as container:
        return sum(1 for _ in container.decode(video=0))


@pytest.mark.nightly
def test_cost_howto_program_matches_the_metrics_by_tenant(tmp_path: Path) -> None:
    """By hand it is what the counters say, and there are counters of those names with those labels."""
    page, keys = DOCS / "guides" / "cost-of-a-request.md", tmp_path / "keys"
    keys.write_text("ada key-ada\nbob key-bob\nroot KEY admin=yes\nsee key-see read=yes\n")
    with serving(tmp_path, "--arena", "64MiB", "--price", "cpu=3600/h", "--api-keys", str(keys)) as server:
        server.ready()
        for key, number in (("key-ada", 2), ("key-bob", 1)):
            with connect(server.url, key) as client:
                for seed in range(number):
                    client.generate("a red circle on white", seed=seed)
        (by_hand,) = programs(page, server)
        sums = json.loads(program(by_hand, tmp_path).replace("'", '"'))
        assert sums.keys() == {"ada", "bob"} and min(sums.values()) > 0
        billed = re.findall(r"by \(tenant.*increase\((\w+)\[", page.read_text())
        assert len(billed) == 2
        for name in billed:
            assert counted(server, name, "key-see") == pytest.approx(sums, abs=0.01), name


def test_custom_queue_backend_howto_detects_broken_backends(tmp_path: Path) -> None:
    (mine,) = [block for block in blocks(DOCS / "contributing" / "add-a-backend.md") if is_python(block)]
    program(mine, tmp_path)
    broken = mine.replace('    """Where mine differs."""', "    async def ping(self): raise OSError\n    submit = ping")
    with pytest.raises(AssertionError, match="rule "):
        program(broken, tmp_path)


@pytest.mark.nightly
def test_readme_programs_run(server: Server, tmp_path: Path) -> None:
    asked, local = programs(ROOT / "README.md", server)
    assert "True" in program(f"{asked}\nprint(len(picture.data[0].b64_json) > 100)", tmp_path)
    program(local, tmp_path)
    assert pixels(tmp_path / "cross.png")


@pytest.mark.nightly
def test_serving_page_program_quantizes_a_transformer(tmp_path: Path) -> None:
    """Of what it saves `doctor` says that it takes less."""
    (text,) = [one for one in blocks(DOCS / "guides" / "quantization.md") if one.startswith("import diffusers as d")]
    model, mine = build("flux", tmp_path / "flux"), tmp_path / "mine"
    program(text.replace("/data/FLUX.1-dev", str(model)).replace("/data/mine", str(mine)), tmp_path, "-W", "ignore")
    for other in model.iterdir():
        if not (mine / other.name).exists():
            (mine / other.name).symlink_to(other)
    assert takes(mine) < takes(model)


def takes(model: Path) -> int:
    """Bytes of the transformer of a model in bfloat16, as far as it is not quantized."""
    command = unfuse("doctor", str(model), "--workers", "all=1", "--dtype", "bfloat16,vae=float32", "--json")
    done = subprocess.run(command, cwd=ROOT, env=environment(model.parent), capture_output=True, text=True, check=True)
    (found,) = [one["memory"] for one in json.loads(done.stdout)["placement"] if one["component"] == "transformer"]
    return int(found)
