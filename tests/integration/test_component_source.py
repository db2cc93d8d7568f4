"""A component from another folder, served: its bytes count, on every worker, and what does not fit ends the start."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.integration.pictures import SHAPES
from tools.server import Server, environment, serving, unfuse

SMALL = {"size": "32x32", "num_inference_steps": 1, "seed": 1}


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A VAE that makes darker pictures than the built-in one."""
    folder = tmp_path_factory.mktemp("other") / "vae"
    shutil.copytree(SHAPES / "vae", folder)
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    (last,) = [name for name in tensors if name.startswith("decoder.conv_out") and name.endswith("bias")]
    tensors[last] = tensors[last] - 0.5
    save_file(tensors, file, {"format": "pt"})
    return folder


def picture(server: Server) -> bytes:
    request = server.submit("a red circle on white", **SMALL)
    assert server.finished(request)["status"] == "completed"
    return server.result(request)


def test_all_workers_load_a_component_from_component_source(vae: Path, tmp_path: Path) -> None:
    """Those that `serve` starts, and one that comes by hand and was told nothing. The picture is that of a folder in
    which somebody has put the other VAE, and not the model's own."""
    copied = tmp_path / "copied"
    shutil.copytree(SHAPES, copied)
    shutil.rmtree(copied / "vae")
    shutil.copytree(vae, copied / "vae")
    for name in ("by-hand", "served", "own"):
        (tmp_path / name).mkdir()
    with serving(tmp_path / "by-hand", str(copied)) as server:
        expected = picture(server.ready())
    flag = f"vae={vae}"
    with serving(tmp_path / "served", "--workers", "encoder=1,denoiser=1", "--component-source", flag) as server:
        server.worker("decoder")
        assert picture(server.ready()) == expected
    with serving(tmp_path / "own") as server:
        assert picture(server.ready()) != expected


@pytest.mark.parametrize(
    ("flags", "says", "code"),
    [
        (("--component-source", "vae"), "is not COMPONENT=FOLDER", 2),
        (("--component-source", "nothing=unfuse/shapes"), "has no component nothing", 1),
        (("unfuse/shapes", "smollm2", "--component-source", "vae=unfuse/shapes"), "needs a single model", 2),
    ],
)
def test_invalid_component_source_fails_the_start(flags: tuple[str, ...], says: str, code: int, tmp_path: Path) -> None:
    command = unfuse("serve", *flags, "--port", "0")
    ran = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == code and says in ran.stderr
    assert "Traceback" not in ran.stderr
