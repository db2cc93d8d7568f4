"""`unfuse generate`: what it refuses, what it shows, how it ends. Drawing is tested elsewhere."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
from PIL import Image
from rich.console import Console
from structlog.testing import capture_logs

from tests.cli.conftest import KEY, Run
from tests.server.served import PICTURES, Served, serve
from unfuse.cli.progress import ProgressBars
from unfuse.cli.terminal import Terminal
from unfuse.client import Client
from unfuse.core.model_spec import PromptVocabulary
from unfuse.core.request import Event
from unfuse.service.settings import load
from unfuse.wire.unix_socket import listen_unix, server_socket


def test_unsupported_output_extension_exits_2(unfuse: Run) -> None:
    code, out, err = unfuse("generate", "x", "-o", "out.gif")
    assert (code, out) == (2, "")
    assert "out.gif" in err
    assert ".webp" in err


def test_prompt_with_unpaired_surrogate_exits_2(unfuse: Run, tmp_path: Path) -> None:
    code, _, err = unfuse("generate", "half a pair: \udcff", "-o", str(tmp_path / "out.png"))
    assert (code, err) == (2, "unfuse: prompt contains an unpaired surrogate, which is not valid Unicode\n")


def test_missing_loras_folder_exits_2(unfuse: Run, tmp_path: Path) -> None:
    code, _, err = unfuse("generate", "x", "-o", str(tmp_path / "out.png"), "--loras", str(tmp_path / "none"))
    assert code == 2
    assert f"--loras {tmp_path / 'none'}: there is no such folder" in err


def test_missing_output_folder_exits_2(unfuse: Run, tmp_path: Path) -> None:
    code, _, err = unfuse("generate", "x", "-o", str(tmp_path / "none" / "out.png"))
    assert code == 2
    assert f"there is no folder {tmp_path / 'none'}" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "out.png", "--frames", "17"], "NAME.mp4 or NAME-%04d.png"),
        (["-o", "out.webp", "--fps", "8"], "NAME.mp4 or NAME-%04d.png"),
        (["-o", "out.webp", "--seconds", "1"], "NAME.mp4 or NAME-%04d.png"),
        (["-o", "out.mp4", "--fps", "121"], "fps must be 1 to 120, not 121"),
        (
            ["-o", "out.png", "--quality", "best"],
            "quality must be one of auto, low, medium, standard, high, hd, xhigh, max, not 'best'",
        ),
        (["--negative", "half a pair: \ud800"], "negative_prompt contains an unpaired surrogate"),
        (["--size", "big"], "size must be auto or WIDTHxHEIGHT in pixels (64x64), not 'big'"),
        (["-o", "out.png", "--lora-scale", "11"], "lora_scale must be -10 to 10, not 11"),
        (["-o", "out-%04d.jpg"], "out-%04d.jpg"),
        (["-o", "."], "-o . is a folder: name a file in it, such as out.png"),
        (["-o", "/proc/out.png"], "-o /proc/out.png: it cannot be written there ("),
        (["--guidance", "nan"], "--guidance nan"),
        (["--guidance", "inf"], "--guidance inf"),
        (["--lora-scale", "-inf"], "--lora-scale -inf"),
        (["-o", "out.png", "--image", "none.png"], "--image none.png: there is no such file"),
        (["-o", "out.mp4", "--last-frame", "none.png"], "--last-frame none.png: there is no such"),
    ],
)
def test_invalid_options_exit_2_with_a_one_line_error(
    unfuse: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = unfuse("generate", "x", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "out.mp4", "--frames", "18"], "at most 17 frames"),
        (["-o", "out-%04d.png", "--frames", "4"], "the nearest below is 1"),
        (["-o", "out.mp4", "-n", "2"], "n must be 1"),
        (["-o", "out.mp4", "--image", "in.png"], "cannot start from a picture"),
        (["-o", "out.png", "--image", "in.png"], "cannot start from a picture"),
    ],
)
def test_unsupported_video_or_start_image_exits_2(
    asking: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8)).save("in.png")
    code, out, err = asking("generate", "a red circle on white", *arguments)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        (
            "--size WxH",
            "Width and height in pixels; auto: the model's default, in the aspect ratio of a start picture.",
        ),
        ("--steps", "Number of denoising steps. [1 to the model's max_steps]"),
        ("--seed", "Seed of the first result, which the response contains; random by default, or if it is -1."),
        ("--guidance", "Guidance scale: how closely the result follows the prompt. [0 to the model's max_guidance]"),
        ("--negative", "A description of what the result should not show."),
        ("--frames", "Length of a video, in frames."),
        ("--fps", "Frames per second of a video. [1 to 120]"),
        ("--lora", "Names of LoRA adapters in the folder of --loras, each with an optional scale; effects are added."),
        ("--lora-scale", "Scale of LoRA adapters without one; 1 by default. [-10 to 10]"),
        ("-n", "Number of pictures, which have consecutive seeds. [1 to the model's max_n] [default: 1]"),
        ("--quality", "[auto, low, medium, standard, high, hd, xhigh, max] [default: auto]"),
    ],
)
def test_help_lists_request_parameters_with_description_and_bounds(unfuse: Run, flag: str, words: str) -> None:
    text = unfuse("generate", "--help")[1]
    assert f"  {flag} " in text
    assert words in " ".join(text.split())


def test_help_omits_request_parameters_set_by_other_arguments(unfuse: Run) -> None:
    text = unfuse("generate", "--help")[1]
    for flag in ("--output-format", "--stream", "--metadata", "--prompt", "--preview-every", "--user"):
        assert f"  {flag}" not in text


def test_output_file_name_selects_the_video_format(idle: Client, asking: Run, tmp_path: Path) -> None:
    asked = ["generate", "a red circle on white", "--frames", "9", "--fps", "4", "-o"]
    for name, form in (("out.mp4", "mp4"), ("out-%04d.png", "png")):
        end = threading.Thread(target=cancel_all, args=(idle,))
        end.start()
        assert asking(*asked, str(tmp_path / name))[0] == 1
        end.join()
        (newest,) = idle.requests(limit=1)
        video = idle.get(f"/v1/videos/{newest['id']}")
        assert (video["num_frames"], video["fps"], video["output_format"]) == (9, 4, form)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "num_inference_steps"),
        (["--size", "63x64"], "63x64"),
        (["-m", "nobody/knows"], "nobody/knows"),
        (["--lora", "ink"], "start it with --loras"),
        (["--lora-scale", "0.5"], "send its name as lora"),
    ],
)
def test_parameters_rejected_by_the_model_exit_2(asking: Run, tmp_path: Path, arguments: list[str], said: str) -> None:
    code, out, err = asking("generate", "a red circle on white", "-o", str(tmp_path / "out.png"), *arguments)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]


def cancel_all(idle: Client) -> None:
    """End what is asked for next."""
    while not (queued := idle.requests(status="queued")):
        pass
    for row in queued:
        idle.request(row["id"]).cancel()


def test_request_cancelled_by_another_client_exits_1(asking: Run, idle: Client, tmp_path: Path) -> None:
    canceller = threading.Thread(target=cancel_all, args=(idle,))
    canceller.start()
    code, out, err = asking("generate", "a red circle on white", "-o", str(tmp_path / "out.png"))
    canceller.join()

    assert (code, out) == (1, "")
    assert "cancelled" in err
    assert not (tmp_path / "out.png").exists()


def test_ctrl_c_cancels_the_request_and_exits_130(idle: Client, tmp_path: Path) -> None:
    environment = {**os.environ, "UNFUSE_SERVER": idle.url, "UNFUSE_API_KEY": KEY}
    command = [sys.executable, "-m", "unfuse", "generate", "a blue star on black", "-o", str(tmp_path / "out.png")]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    mine = next(line for line in process.stderr if line.startswith(b"request ")).decode().split()[1]
    process.send_signal(signal.SIGINT)
    process.communicate()

    assert process.returncode == 130
    assert idle.request(mine).view["status"] == "cancelled"


@pytest.fixture
def drawing(unfuse: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Run, Served]]:
    """Run a command line whose server draws, in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    knowing = msgspec.structs.replace(PICTURES, vocabulary=PromptVocabulary(("a", "circle", "on", "white"), "circles"))
    with capture_logs(), serve(tmp_path / "served", cards=[knowing], idle=False) as served:
        monkeypatch.setenv("UNFUSE_SERVER", served.url)
        yield unfuse, served


def test_existing_output_file_is_replaced_only_with_overwrite(drawing: tuple[Run, Served], tmp_path: Path) -> None:
    unfuse, _ = drawing
    (tmp_path / "out.png").write_bytes(b"mine")
    code, out, err = unfuse("generate", "a circle")
    assert (code, out.split()[0]) == (0, "out-2.png")
    assert "out.png exists, so the new file is out-2.png; --overwrite replaces existing files" in err.splitlines()
    assert (tmp_path / "out.png").read_bytes() == b"mine"

    code, out, err = unfuse("generate", "a circle", "-n", "3")  # of which out-2.png would be one
    assert [line.split()[0] for line in out.splitlines()] == ["out-2-0.png", "out-2-1.png", "out-2-2.png"]

    code, out, err = unfuse("generate", "a circle", "--overwrite")
    assert (code, out.split()[0]) == (0, "out.png")
    assert "already" not in err
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")

    found = json.loads(unfuse("generate", "a circle", "-o", "f-%02d.png", "--frames", "5", "--json")[1])
    again = json.loads(unfuse("generate", "a circle", "-o", "f-%02d.png", "--frames", "5", "--json")[1])
    assert (found["files"][-1], again["files"][-1]) == ("f-04.png", "f-2-04.png")


def test_hyphen_prompt_is_read_from_stdin(drawing: tuple[Run, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    unfuse, served = drawing
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("ein Kreis — weiß\n".encode())))
    code, _, err = unfuse("generate", "-")
    assert code == 0
    request = next(line.split()[1] for line in err.splitlines() if line.startswith("request "))
    assert served.run(served.queue.load(request)).context.request.params["prompt"] == "ein Kreis — weiß"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n")))
    code, out, err = unfuse("generate", "-")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "standard input is not UTF-8" in err


def test_prompt_words_unknown_to_the_model_print_a_warning(drawing: tuple[Run, Served]) -> None:
    unfuse, served = drawing
    assert "was not trained" not in unfuse("generate", "a circle on white")[2]
    code, out, err = unfuse("generate", "a spaceship on white", "--json")
    assert "test/pictures was not trained on spaceship: it generates circles" in err.splitlines()
    assert code == 0 and json.loads(out)["files"]


NOTHING_STARTS = "a worker started"


@pytest.fixture
def alone(unfuse: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line that has no server, and must not start workers."""

    @contextmanager
    def start(*_: object) -> Iterator[None]:
        raise AssertionError(NOTHING_STARTS)
        yield

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNFUSE_SERVER", raising=False)
    monkeypatch.setattr("unfuse.service.service._served", start)
    return unfuse


def test_valid_request_without_a_server_starts_workers(alone: Run) -> None:
    with pytest.raises(AssertionError, match=NOTHING_STARTS):
        alone("generate", "a circle")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--lora", "ink"], 2, "set that folder by --loras FOLDER"),
        (["--lora", "ink", "--loras", "loras"], 2, "lora 'ink' does not exist; available: empty"),
        (["--lora", "empty", "--loras", "loras"], 2, "lora 'empty' is empty"),
        (["--lora-scale", "0.5"], 2, "send its name as lora"),
        (["--size", "100x100"], 2, "the nearest is 96x96"),
        (["-o", "out.mp4", "--frames", "18"], 2, "at most 17 frames"),
    ],
)
def test_invalid_request_exits_2_before_workers_start(
    alone: Run, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    (tmp_path / "loras").mkdir()
    (tmp_path / "loras" / "empty.safetensors").write_bytes(len(b"{}").to_bytes(8, "little") + b"{}")
    found, out, err = alone("generate", "a circle", *arguments)
    assert (found, out) == (code, "")
    assert said in err.splitlines()[-1]


@pytest.mark.parametrize("verb", ["generate", "serve"])
def test_missing_peft_library_exits_1_before_workers_start(
    alone: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr("unfuse.weights.adapters.find_spec", lambda name: None)
    monkeypatch.setattr("unfuse.cli.serve.ForkServers", lambda models: ExitStack())
    arguments = ["a circle"] if verb == "generate" else ["--port", "0"]
    code, out, err = alone(verb, *arguments, "--loras", str(tmp_path))
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "unfuse: --loras needs the library peft: pip install 'unfuse[lora]'"


def test_running_local_server_is_suggested_without_server_flag(alone: Run) -> None:
    with listen_unix(server_socket(load().settings.run_dir, 23456)):
        code, _, err = alone("generate", "a circle", "--size", "100x100")
    assert "to use it instead of starting workers, add --server http://127.0.0.1:23456" in err
    assert code == 2


def drawn(*events: Event) -> str:
    """What the bars look like in the end."""
    terminal = Terminal()
    terminal.console = Console(file=io.StringIO(), width=100, force_terminal=False)
    with ProgressBars(terminal, str) as bars:
        for event in events:
            bars.show(event)
    assert isinstance(terminal.console.file, io.StringIO)
    return terminal.console.file.getvalue()


def test_every_stage_has_a_progress_bar_with_its_steps() -> None:
    lines = drawn(
        Event("queued"),
        Event("stage_started", stage="text_encode"),
        Event("stage_completed", stage="text_encode"),
        Event("stage_started", stage="denoise.0"),
        Event("progress", stage="denoise.0", step=3, steps=20),
    ).splitlines()

    assert [line.split()[0] for line in lines] == ["text_encode", "denoise.0"]
    assert "1/1" in lines[0]
    assert "3/20" in lines[1]


def test_retried_stage_shows_the_reason_and_resets_its_progress() -> None:
    text = drawn(
        Event("stage_started", stage="denoise.0"),
        Event("progress", stage="denoise.0", step=3, steps=20),
        Event("retrying", stage="denoise.0", message="the compute process died [signal 9]"),
    )

    assert "denoise.0: the compute process died [signal 9]" in text
    assert "0/20" in text


def test_a_finished_stage_shows_all_its_steps() -> None:
    text = drawn(
        Event("progress", stage="denoise.0", step=20, steps=20),
        Event("stage_completed", stage="denoise.0"),
        Event("completed"),
    )
    assert "20/20" in text
