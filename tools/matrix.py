"""Writes docs/reference/matrix.md, the supported features: `python -m tools.matrix [FILE]`.

What a family supports is read from the code: from the model specs of tiny models, which are built for this. What is
proven is read from the tests that pytest collects. `tools/matrix_proofs.py` has the tests of each feature.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from tools.matrix_proofs import (
    COPIES,
    MEDIA,
    READ_CALLS,
    REQUIRED_CALLS,
    ROWS,
    SCRIPTED_CALLS,
    SCRIPTED_REASONING,
    SELECTED_REASONING,
    SERVED_CALLS,
    SERVED_REASONING,
    SHAPES,
    TABLES,
    Columns,
    Proof,
    all_proofs,
)
from tools.matrix_text import HARDWARE, HEAD, INTRODUCTIONS, PARSERS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "matrix.md"
H100 = ROOT / "bench" / "results" / "gpu-h100.json"

NO, NEVER = "no", "never ran"

#: The row of each kind.
KINDS = {kind: row for row, kinds in ROWS.items() for kind in kinds}

#: Collects tests in a process of its own and prints them: name, whether it is nightly, whether it needs a GPU.
COLLECT = """
import json, sys, pytest
class Found:
    def pytest_collection_finish(self, session):
        marks = lambda item: [item.get_closest_marker(name) is not None for name in ("nightly", "gpu")]
        print("FOUND" + json.dumps([[item.nodeid, *marks(item)] for item in session.items]))
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[Found()]))
"""


@dataclass(frozen=True)
class Test:
    """A collected test: its parameters as pytest writes them, and when it runs."""

    parameters: str
    is_nightly: bool
    needs_gpu: bool


@dataclass(frozen=True)
class Evidence:
    """The test that proves a cell."""

    proof: Proof
    parameters: str
    mark: str
    #: The kinds of the row, if the test does not name them in its parameters.
    kinds: tuple[str, ...] = ()

    def shown(self, row: str) -> str:
        """Return how the table of tests names this run: parameters, and kinds of rows that have several."""
        parameters = f" `[{self.parameters}]`" if self.parameters else ""
        kinds = sorted(self.kinds) if len(ROWS[row]) > 1 else []
        return parameters + (f" ({', '.join(f'`{kind}`' for kind in kinds)})" if kinds else "")


@cache
def collected() -> dict[str, list[Test]]:
    """Return the tests of all proofs, by file and function."""
    files = sorted({proof.file for proof in all_proofs()})
    run = subprocess.run([sys.executable, "-c", COLLECT, *files], cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("FOUND"))
    found: dict[str, list[Test]] = {}
    for name, is_nightly, needs_gpu in json.loads(line.removeprefix("FOUND")):
        test, _, parameters = name.partition("[")
        parameters = parameters.removesuffix("]").replace(str(ROOT / "unfuse" / "models" / "shapes"), SHAPES)
        found.setdefault(test, []).append(Test(parameters, is_nightly, needs_gpu))
    return found


@cache
def jobs() -> dict[str, Any]:
    """Return the jobs of the tests of models, by name."""
    conftest = import_module("tests.models.conftest")
    lists = (conftest.JOBS, conftest.CACHED, conftest.LORA_JOBS, conftest.FILES, conftest.QUANTIZED, conftest.TILED)
    return {job.name: job for listed in lists for job in listed}


def kind_of(parameters: str) -> str:
    """Return the kind of tiny model that a test's parameters name; "" for none."""
    if parameters in jobs():
        model = jobs()[parameters].model
        return SHAPES if Path(model).name == SHAPES else COPIES.get(model, model)
    named = [kind for kind in KINDS if f"-{kind}-" in f"-{parameters}-"]
    return max(named, key=len, default="")


def has_parameters(proof: Proof, parameters: str) -> bool:
    """Return whether the job that a test's parameters name has the parameters that the proof asks for."""
    if not proof.where:
        return True
    given = dict(jobs()[parameters].params)
    given |= {"frames": True} if given.get("num_frames", 1) > 1 else {}
    return all((name.removeprefix("!") in given) != name.startswith("!") for name in proof.where)


def evidence(proof: Proof, kinds: Sequence[str]) -> Iterator[Evidence]:
    """Find the runs of a proof's test with one of these kinds."""
    for test in collected()[proof.test]:
        if not re.search(proof.only, test.parameters):
            continue
        mark = "†" if test.needs_gpu else "*" if test.is_nightly else ""
        if proof.spread:
            names = [name for how, name in spreads(proof) if re.search(proof.spread, how) and kind_of(name) in kinds]
            yield from (Evidence(proof, name, mark) for name in names[:1])
        elif proof.jobs:
            listed = [job.name for job in getattr(import_module("tests.models.conftest"), proof.jobs)]
            yield from (Evidence(proof, name, mark) for name in listed if kind_of(name) in kinds)
        elif proof.kinds:
            if not set(proof.kinds).isdisjoint(kinds):
                yield Evidence(proof, test.parameters, mark, tuple(set(proof.kinds).intersection(kinds)))
        elif kind_of(test.parameters) in kinds and has_parameters(proof, test.parameters):
            yield Evidence(proof, test.parameters, mark)


def spreads(proof: Proof) -> list[tuple[str, str]]:
    """Return what a test of tests/parallel/test_spreads.py asks ranks for: pairs of a spread and a job."""
    module = import_module("tests.parallel.test_spreads")
    body = ast.parse(inspect.getsource(getattr(module, proof.function)))
    calls = [node for node in ast.walk(body) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    asked = [call for call in calls if call.func.id in ("tasks", "in_turn")]  # type: ignore[attr-defined]
    names = {**vars(module), "jobs": [job.name for job in module.c.JOBS]}
    return [pair for call in asked for pair in eval(ast.unparse(call), names)]


@cache
def supported() -> dict[str, frozenset[str]]:
    """Return the columns that each kind of tiny model supports, as the code has it."""
    from tools import tiny, tiny_language, tiny_vision, tiny_whole
    from unfuse.models import resolve_source

    found: dict[str, frozenset[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kinds in MEDIA.values():
            for kind in kinds:
                build = tiny.build if kind in tiny.KINDS else tiny_whole.build
                place = resolve_source("unfuse/shapes") if kind == SHAPES else build(kind, Path(folder) / kind)
                found[kind] = frozenset(media_features(place))
        for kind in tiny_language.KINDS:
            found[kind] = frozenset(text_features(tiny_language.make_language_model(Path(folder) / kind, kind)))
        for kind in tiny_vision.KINDS:
            found[kind] = frozenset(text_features(tiny_vision.make_vision_model(Path(folder) / kind, kind)))
    return found


def media_features(folder: Path) -> Iterator[str]:
    """Yield the columns that a model for pictures or videos supports."""
    import diffusers
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    from unfuse.models import find, read_model_spec
    from unfuse.models.modular import Modular
    from unfuse.models.undivided_family import LAST

    spec, family = read_model_spec("m", folder), find(folder)
    is_divided, has_blocks = not spec.undivided_reason, isinstance(family, Modular)
    modes = {(one.name, one.mode) for one in spec.accepts if one.max}
    names = {"start": "start picture", "redraw": "redraw (`strength`)", "reference": "reference pictures"}
    yield from ("text", "served", "cancel", "torchao", "`--component-source`", "`--vae sliced`", "`--vae tiled`")
    yield from ("`--offload model`", "`--offload sequential`")
    yield from (names[mode] for name, mode in modes if name == "image")
    yield from ["mask"] * (("mask", "redraw") in modes)
    yield from ["last frame"] * (("last_frame", "end") in modes or not is_divided and bool(LAST))
    yield from ["video"] * (spec.limits.get("max_frames", 1) > 1)
    yield from ["video while it is decoded"] * hasattr(getattr(family, "vae", None), "decode_fragments")
    yield from ["continuous batching"] * (not has_blocks)
    yield from ["LoRA", "LoRA of other tools"] * spec.takes_lora
    yield from ["stage by stage", "a worker for each stage"] * is_divided
    if is_divided and not has_blocks:
        yield from ("previews", "exact batches", "batched", "resume from a checkpoint")

    for stage in spec.pipeline.stages:
        yield from (f"`{kind}`" for kind in stage.parallelism if kind == "tiles" or stage.kind == "denoise")
        yield from ["`tensor` of encoders"] * ("tensor" in stage.parallelism and stage.kind.startswith("text_encode"))
    component = next((name for name in ("transformer", "unet") if (folder / name).exists()), "")
    kind = getattr(diffusers, json.loads((folder / component / "config.json").read_text())["_class_name"])
    yield from ["single file", "GGUF"] * any(base.__name__ in SINGLE_FILE_LOADABLE_CLASSES for base in kind.__mro__)
    yield from ["feature cache"] * (is_divided and not has_blocks and has_feature_cache(kind, folder / component))


def has_feature_cache(kind: Any, folder: Path) -> bool:
    """Return whether the feature cache can be installed in this transformer."""
    from unfuse.core.errors import PermanentError
    from unfuse.stages.feature_cache import FeatureCache

    try:
        FeatureCache([kind.from_pretrained(folder)]).install()
    except PermanentError:
        return False
    return True


def text_features(folder: Path) -> Iterator[str]:
    """Yield the columns that a language model supports."""
    from unfuse.models import read_model_spec
    from unfuse.weights.gguf_model import ARCHITECTURES

    spec = read_model_spec("m", folder)
    yield from ("text", "served", "prefill and decode apart", "batched", "exact", "chunked prefill", "resume", "cancel")
    yield from ("structured outputs", "tool calls", "reasoning")
    yield from ["prefix caching"] * any(stage.prefix_cached for stage in spec.pipeline.stages)
    yield from ["pictures", "videos"] * (spec.vision is not None)
    yield from ["`tensor`"] * all("tensor" in stage.parallelism for stage in spec.pipeline.stages)
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    yield from ["GGUF"] * (architecture in ARCHITECTURES.values())


@dataclass
class Numbered:
    """The tests of one table, numbered in the order in which its cells cite them."""

    first: int
    #: By test and row, the runs.
    cited: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def cell(self, row: str, found: Evidence) -> str:
        """Return the cell that cites a test, and remember the row that it proves."""
        runs = self.cited.setdefault(found.proof.test, {}).setdefault(row, [])
        if found.shown(row) not in runs:
            runs.append(found.shown(row))
        return f"✓ {self.first + [*self.cited].index(found.proof.test)}{found.mark}"

    def lines(self) -> Iterator[str]:
        """Yield the rows of the table of tests."""
        for number, (test, rows) in enumerate(self.cited.items(), self.first):
            file, _, function = test.partition("::")
            shown = ", ".join(row + "".join(runs) for row, runs in rows.items())
            yield f"| {number} | `{file}` `{function}`: {shown} |"


def best(proofs: Sequence[Proof], kinds: Sequence[str]) -> Evidence | None:
    """Return what proves a cell: rather a test that runs by day."""
    found = [one for proof in proofs for one in evidence(proof, kinds)]
    return min(found, key=lambda one: ("", "*", "†").index(one.mark), default=None)


def cell(row: str, column: str, proofs: Sequence[Proof], numbered: Numbered) -> str:
    """Return the text of a cell."""
    kinds = [kind for kind in ROWS[row] if column in supported()[kind]]
    if not kinds:
        return NO
    found = best(proofs, kinds)
    return numbered.cell(row, found) if found else NEVER


def table(rows: Mapping[str, object], columns: Columns, first: int) -> tuple[list[str], Numbered]:
    """Return a table's lines, and its tests, which are numbered from `first`."""
    numbered = Numbered(first)
    lines = [f"| | {' | '.join(columns)} |", f"|---{'|---' * len(columns)}|"]
    for row in rows:
        cells = [cell(row, column, proofs, numbered) for column, proofs in columns.items()]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return lines, numbered


def parser_lines() -> Iterator[str]:
    """Yield the table of the parsers of tool calls and reasoning."""
    from unfuse.language.answer_reader import CALL_FORMATS, REASONING_FORMATS

    def run(proof: Proof, word: str) -> str:
        tests = [one for one in collected()[proof.test] if word and re.match(rf"{word}(-|$)", one.parameters)]
        return "✓" if tests else NEVER

    yield "| `--tool-call-parser` | served | read alone | required calls |"
    yield "|---|---|---|---|"
    for name in CALL_FORMATS:
        served = run(SERVED_CALLS, SCRIPTED_CALLS.get(name, ""))
        yield f"| `{name}` | {served} | {run(READ_CALLS, name)} | {run(REQUIRED_CALLS, name)} |"
    yield ""
    yield "| `--reasoning-parser` | served |"
    yield "|---|---|"
    for name in REASONING_FORMATS:
        by_flag = SELECTED_REASONING.get(name) and SELECTED_REASONING[name].test in collected()
        yield f"| `{name}` | {'✓' if by_flag else run(SERVED_REASONING, SCRIPTED_REASONING.get(name, ''))} |"


def hardware_lines() -> Iterator[str]:
    """Yield the table of devices. Every kind that the bench ran on the GPU counts for its family."""
    ran = [json.loads(line) for line in H100.read_text().splitlines()]
    kinds = {one["what"] for one in ran if one["part"] == "families" and one.get("same_twice")}
    kinds |= {"LlamaForCausalLM"} if any(one.get("what") == "text" for one in ran) else set()
    others = ("several GPUs", "ROCm", "XPU", "MPS")
    yield f"| | CPU | one NVIDIA GPU | {' | '.join(others)} |"
    yield f"|---|---|---|{'---|' * len(others)}"
    for row, names in ROWS.items():
        on_gpu = sorted(kinds.intersection(names))
        cited = f"✓ {', '.join(f'`{name}`' for name in on_gpu)}" if on_gpu else NEVER
        yield f"| {row} | ✓ | {cited} | {' | '.join([NEVER] * len(others))} |"


def page() -> str:
    """Return the whole page."""
    parts, first = [HEAD], 1
    for title, (rows, columns) in TABLES.items():
        lines, numbered = table(rows, columns, first)
        tests = ["| | test |", "|---|---|", *numbered.lines()]
        first += len(numbered.cited)
        parts += [f"## {title}", INTRODUCTIONS[title], "\n".join(lines), "\n".join(tests)]
    parts += ["## Parsers", PARSERS, "\n".join(parser_lines())]
    parts += ["## Hardware", HARDWARE, "\n".join(hardware_lines())]
    return "\n\n".join([*parts, "Next: [Model families](families.md), [Parameters](parameters.md)"]) + "\n"


if __name__ == "__main__":
    (Path(sys.argv[1]) if sys.argv[1:] else PAGE).write_text(page())
