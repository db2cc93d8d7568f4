"""What shipped code must never do, looked for in its syntax, and what a light process must never import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tools.house import parsed

ROOT = Path(__file__).parents[1]

MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
"""Reading what these wrote runs code."""

CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "torch.load",
    "torch.save",
    "yaml.load",
    "yaml.unsafe_load",
    "tempfile.mktemp",
}
METHODS = {"recv_pyobj", "send_pyobj", "load_module"}
KEYWORDS = {("shell", True), ("trust_remote_code", True), ("allow_pickle", True), ("weights_only", False)}


def dangers(tree: ast.AST) -> list[str]:
    """What in a source would let a stranger's bytes run code."""
    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if name.name.split(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module), names=names):
                found += [module] if module.split(".")[0] in MODULES else []
                found += [f"{module}.{name.name}" for name in names if f"{module}.{name.name}" in CALLS]
            case ast.Call(func=func, keywords=keywords):
                name = ast.unparse(func)
                found += [name] if name in CALLS or name.rpartition(".")[2] in METHODS else []
                found += [
                    f"{word.arg}={word.value.value}"
                    for word in keywords
                    if isinstance(word.value, ast.Constant) and (word.arg, word.value.value) in KEYWORDS
                ]
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "unfuse").rglob("*.py")), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_shipped_code_has_no_unsafe_deserialization_or_eval(path: Path) -> None:
    assert dangers(parsed(path)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import loads",
        "import torch\ntorch.load(x)",
        "from torch import load",
        "eval('1')",
        "yaml.load(x)",
        "socket.recv_pyobj()",
        "subprocess.run(x, shell=True)",
        "numpy.load(x, allow_pickle=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
    ],
)
def test_unsafe_calls_are_detected(source: str) -> None:
    assert dangers(ast.parse(source)) != []


def test_safe_calls_are_not_reported() -> None:
    ordinary = "import json, re\nre.compile('a')\njson.load(f)\nmodel.eval()\ntorch.load_state"
    assert dangers(ast.parse(ordinary)) == []


HEAVY = {"torch", "diffusers", "transformers", "fastapi", "starlette", "uvicorn", "numpy", "PIL", "zmq"}


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after running this code."""
    report = f"import sys\ntry:\n    {code}\nexcept SystemExit: pass\nsys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True, cwd=ROOT)
    return {name.split(".")[0] for name in done.stderr.split()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import unfuse",
        "from unfuse.cli.main import run; run(['--help'])",
        "from unfuse.cli.main import run; run(['version'])",
    ],
)
def test_light_entry_points_import_no_heavy_modules(code: str) -> None:
    assert modules_after(code) & HEAVY == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "unfuse.service.service",
        "unfuse.service.worker",
        "unfuse.service.comparison",
        "unfuse.server",
        "unfuse.scheduler.scheduler",
        "unfuse.worker.worker",
    ],
)
def test_control_processes_import_no_torch(module: str) -> None:
    loaded = modules_after(f"import {module}")
    assert module.split(".")[0] in loaded
    assert loaded & {"torch", "diffusers", "transformers"} == set()


@pytest.mark.slow
def test_worker_does_not_import_the_gateway_framework() -> None:
    loaded = modules_after("import unfuse.service.worker, unfuse.service.addresses")
    assert loaded & {"fastapi", "starlette", "uvicorn"} == set()


@pytest.mark.slow
def test_service_modules_import_without_typer_and_rich() -> None:
    modules = [f"unfuse.service.{path.stem}" for path in sorted((ROOT / "unfuse" / "service").glob("[!_]*.py"))]
    assert "unfuse.service.service" in modules
    block = "import sys; sys.modules |= dict.fromkeys(['typer', 'rich', 'unfuse.cli'])"
    code = f"{block}; import unfuse, {', '.join(modules)}; unfuse.local"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.slow
def test_python_m_unfuse_runs_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "unfuse", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "generate" in done.stdout


def test_builtin_model_has_only_safetensors_json_and_markdown() -> None:
    kinds = {path.suffix for path in (ROOT / "unfuse" / "models" / "shapes").rglob("*") if path.is_file()}
    assert kinds <= {".safetensors", ".json", ".md"}
