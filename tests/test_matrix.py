"""docs/reference/matrix.md: the tests that it names exist and name the families, and it is up to date."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tools.matrix import PAGE, ROOT
from tools.matrix_proofs import BY_ANOTHER_NAME, MEDIA, ROWS, TABLES, TEXT, Proof, all_proofs
from unfuse.models import FAMILIES

#: What tests of a folder share.
SHARED = ("tests/models/conftest.py", "tools/tiny.py", "tools/tiny_language.py", "tools/tiny_vision.py")

#: The classes of the rows for texts, by the kinds of tiny models.
CLASSES = {
    "Qwen2_5_VL": "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VL": "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoe": "Qwen3VLMoeForConditionalGeneration",
}


@cache
def source(file: str) -> str:
    return (ROOT / file).read_text()


@cache
def functions(file: str) -> set[str]:
    """The names of all functions of a file."""
    return {node.name for node in ast.walk(ast.parse(source(file))) if isinstance(node, ast.FunctionDef)}


@cache
def literals(file: str) -> set[str]:
    """All string constants of a file."""
    return texts_in(ast.parse(source(file)))


def texts_in(*nodes: ast.AST) -> set[str]:
    """All string constants below these nodes, as pytest writes them."""
    below = [one.value for node in nodes for one in ast.walk(node) if isinstance(one, ast.Constant)]
    return {text.encode("unicode_escape").decode() for text in below if isinstance(text, str)}


@cache
def parameter_words(file: str) -> set[str]:
    """What parameters of tests are made of: kinds, and strings in decorators and constants."""
    module = ast.parse(source(file))
    decorators = [one for node in ast.walk(module) for one in getattr(node, "decorator_list", [])]
    constants = [node for node in module.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    kinds = {kind for kinds in ROWS.values() for kind in kinds}
    return texts_in(*decorators, *constants) | kinds | {"True", "False", "None", ""}


def missing_tests(page: str) -> Iterator[str]:
    """Find the tests of a page that are not there, and their runs whose parameters no source names."""
    for file, test, runs in re.findall(r"^\| \d+ \| `(tests/[\w/]+\.py)` `(\w+)`:(.*) \|$", page, re.MULTILINE):
        if not (ROOT / file).exists() or test not in functions(file):
            yield f"{file} {test}"
            continue
        jobs = literals(file).union(*map(literals, SHARED))
        for parameters in re.findall(r"`\[([^`]+)\]`", runs):
            if parameters not in jobs and not is_made_of(parameters, parameter_words(file)):
                yield f"{file} {test}[{parameters}]"


def is_made_of(parameters: str, known: set[str]) -> bool:
    """Return whether a test's parameters are known words joined by "-", with numbers where pytest adds them."""
    if parameters in known or parameters.rstrip("0123456789") in known:
        return True
    cuts = [found.start() for found in re.finditer("-", parameters)]
    return any(is_made_of(parameters[:cut], known) and is_made_of(parameters[cut + 1 :], known) for cut in cuts)


def is_named(kind: str, proof: Proof) -> bool:
    """Return whether the file of a proof names this kind, as text or by what stands for it."""
    others = BY_ANOTHER_NAME.get(kind, ()) + (("KINDS",) if kind in sum(TEXT.values(), ()) else ())
    return kind in literals(proof.file) or any(other in source(proof.file) for other in others)


def test_tests_named_in_the_matrix_exist_with_their_parameters() -> None:
    assert not [*missing_tests(PAGE.read_text())]


def test_missing_tests_of_a_matrix_are_detected() -> None:
    """Given a page with a test that is not there, or a run of parameters that no source has, then both are found."""
    page = PAGE.read_text()
    number = page.count("`test_latents_and_pixels_equal")
    renamed = page.replace("`test_latents_and_pixels_equal", "`test_latents_and_pixels_differ")
    assert len([*missing_tests(renamed)]) == number > 1
    assert [*missing_tests(page.replace("`[flux-negative]`", "`[flux-positive]`"))]


@pytest.mark.parametrize("proof", all_proofs(), ids=lambda proof: f"{proof.function}-{','.join(proof.kinds)}")
def test_each_proof_is_a_test_that_names_its_kinds(proof: Proof) -> None:
    assert proof.function in functions(proof.file)
    assert [kind for kind in proof.kinds if not is_named(kind, proof)] == []
    assert not proof.jobs or re.search(rf"\b{proof.jobs}\b", source(proof.file))


def test_matrix_has_a_row_for_every_family() -> None:
    """Of pictures and videos by the pipelines that `tools/tiny.py` saves, of texts by their class."""
    kinds = [kind for kinds in TEXT.values() for kind in kinds]
    assert {CLASSES.get(kind, kind) for kind in kinds} == {name for name in FAMILIES if "ForC" in name}
    tiny = {kind for kinds in MEDIA.values() for kind in kinds}
    listed = re.findall(
        r'^    "([\w.-]+)",$', source("tools/tiny.py").partition("KINDS = (")[2].partition("\n)")[0], re.M
    )
    assert len(listed) > 20 and {*listed} <= tiny
    pipelines = {*re.findall(r"\w+Pipeline", source("tools/tiny.py"))}
    assert {name for name in FAMILIES if name.endswith("Pipeline")} <= pipelines


def test_matrix_has_every_row_in_every_table_of_its_kind() -> None:
    page = PAGE.read_text()
    for title, (rows, columns) in TABLES.items():
        section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
        assert all(f"\n| {row} |" in section for row in rows), title
        assert f"| | {' | '.join(columns)} |" in section
    assert {*MEDIA, *TEXT} == {*ROWS}


@pytest.mark.slow
def test_matrix_page_is_up_to_date_with_code_and_tests(tmp_path: Path) -> None:
    made = tmp_path / "matrix.md"
    subprocess.run([sys.executable, "-m", "tools.matrix", str(made)], cwd=ROOT, capture_output=True, check=True)
    assert PAGE.read_text() == made.read_text(), "run: python -m tools.matrix"
