"""Gates on the source: small files, small functions, plain names, imports between the top folders."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tools.house import PAGE, parsed, used, with_imports
from tools.statements import statements

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "unfuse").rglob("*.py"))
TREES = {path.relative_to(ROOT).as_posix(): parsed(path) for path in SOURCES}

BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BANNED = {"Manager", "Helper", "Handler", "Util", "Utils", "Common", "Misc", "Mixin", "Base", "V1"}
"""Words that say nothing: no module or class is named by one of them alone, none ends in one. `base.py` is a port's."""

FAMILIES = {"wan", "flux", "hunyuan", "qwen", "ltx", "cogvideo", "mochi", "sdxl", "pixart", "sana", "chroma", "lumina"}
"""Model families, of which the rest of the house must know nothing."""


def words(text: str) -> set[str]:
    """The words of a text in lower case, those inside identifiers apart: `AutoencoderKLWan` has three."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)}


def lines(path: Path) -> int:
    """Lines of a file."""
    return path.read_text().count("\n")


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with a name to find it by."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                yield f"{path}:{node.lineno} {node.name}", node


def depth(node: ast.AST) -> int:
    """Nested blocks inside a node; an elif is as deep as its if, an inner function starts anew."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            continue
        chained = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, depth(child) + (isinstance(child, BLOCKS) and not chained))
    return deepest


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function, its docstring not counted."""
    docstring = node.body[0] if ast.get_docstring(node) is not None else None
    documented = (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
    return (node.end_lineno or node.lineno) - node.lineno + 1 - documented


def test_files_have_at_most_600_lines() -> None:
    assert {path.name: lines(path) for path in SOURCES if lines(path) > 600} == {}


def test_functions_have_at_most_60_lines_and_most_at_most_30() -> None:
    lengths = {name: length(node) for name, node in functions()}
    assert {name: count for name, count in lengths.items() if count > 60} == {}
    ordered = sorted(lengths.values())
    assert ordered[int(0.95 * len(ordered))] <= 30


def test_docstrings_do_not_count_towards_function_length() -> None:
    [documented] = ast.parse('def f():\n """One.\n\n Two."""\n return 1\n').body
    assert isinstance(documented, ast.FunctionDef)
    assert (length(documented), statements(documented)) == (2, 2)


def test_blocks_nest_at_most_four_deep() -> None:
    assert [name for name, node in functions() if depth(node) > 4] == []


def test_nesting_depth_counts_elif_as_its_if() -> None:
    chain = "def f():\n if a: pass\n elif b: pass\n elif c:\n  for x in y: pass\n"
    nested = "def f():\n for x in y:\n  if a:\n   with b:\n    while c:\n     try: pass\n     except E: pass\n"
    assert (depth(ast.parse(chain).body[0]), depth(ast.parse(nested).body[0])) == (2, 5)


def crowded_lines(tree: ast.AST) -> list[int]:
    """The lines of a tree that assign three names at once, each from a value of its own or all from one."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and (isinstance(node.value, ast.Tuple) or len(node.targets) > 1):
            names = [part for name in node.targets for part in (name.elts if isinstance(name, ast.Tuple) else [name])]
            found += [node.lineno] if len(names) > 2 else []
    return found


def test_lines_assign_at_most_two_names() -> None:
    assert {path: lines for path, tree in TREES.items() if (lines := crowded_lines(tree))} == {}


def test_line_that_assigns_three_names_is_recognized() -> None:
    assert crowded_lines(ast.parse("a = 1\nb, c = 1, 2\nd = e = f = 1\ng, h, i = 1, 2, 3\nj, k, m = call()")) == [3, 4]


def test_no_line_disables_the_formatter() -> None:
    folders = ("unfuse", "tests", "tools", "bench")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in files if re.search(r"# fmt: (?:skip|off)", path.read_text())] == []


def test_classes_and_modules_have_no_generic_names() -> None:
    classes = [
        f"{path} {node.name}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and re.findall(r"[A-Z][a-z]*\d*", node.name)[-1] in BANNED
    ]
    modules = [path for path in TREES if Path(path).stem.title() in BANNED - {"Base"}]
    assert classes + modules == []


FORMATS = {
    "unfuse/language/answer_reader.py",
    "unfuse/language/tokenizer.py",
    "unfuse/weights/gguf_model.py",
    "unfuse/weights/source.py",
    "unfuse/weights/single.py",
}
"""Tables of names that others gave: of repositories on the hub, parsers, tokenizers, and keys of other tools' files."""


def test_model_families_are_named_only_in_the_models_package() -> None:
    found = [
        f"{path}:{number} {line.strip()}"
        for path in TREES
        if not path.startswith("unfuse/models/") and path not in FORMATS
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
        if words(line) & FAMILIES
    ]
    assert found == []


def test_model_family_names_are_recognized_in_all_spellings() -> None:
    for text in (
        "WanPipeline",
        "wan_i2v",
        '"flux"',
        "Wan2.1",
        "FluxTransformer",
        "AutoencoderKLWan",
        "LTXVideo",
        "FLUX.1",
    ):
        assert words(text) & FAMILIES, text
    assert not words("wanted wants influx fluxes sanity Wander") & FAMILIES


APART = {"unfuse": {"bench", "tests", "tools"}, "tools": {"bench", "tests"}, "bench": {"tests"}, "tests": {"bench"}}
"""What each of the four folders imports nothing of: what tests and benches share lies in tools."""


def imported(tree: ast.AST) -> set[str]:
    """The packages that a module imports, anywhere in it."""
    names = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def test_benchmarks_and_tests_do_not_import_each_other() -> None:
    """Only files that have the word are parsed."""
    found = [
        f"{path.relative_to(ROOT)} imports {other}"
        for folder, others in APART.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
        for text in [path.read_text()]
        for other in sorted(others)
        if re.search(rf"\b{other}\b", text) and other in imported(parsed(path))
    ]
    assert found == []


def test_imports_are_found_at_any_nesting_level() -> None:
    said = "import os, bench.hop\ndef f():\n from tests.core import a\n from . import bench\n import unfuse as tools\n"
    assert imported(ast.parse(said)) == {"os", "bench", "tests", "unfuse"}


def test_listed_imports_of_folders_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert with_imports(page) == page, "run: python -m tools.house"
    assert [folder for folder in used() if f"| `{folder}/` |" not in page] == []
