"""Words of the package and its documents: the terms of the field are found, and private ones are gone."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from unfuse.core.retries import RULES

ROOT = Path(__file__).parents[1]

#: Term, the file of the package that implements it, and the page that describes it.
TERMS = (
    ("KV cache", "language/paged_kv.py", "concepts/kv-cache.md"),
    ("paged attention", "language/paged_kv.py", "concepts/kv-cache.md"),
    ("prefix caching", "stages/sequence_pool.py", "concepts/kv-cache.md"),
    ("chunked prefill", "stages/language.py", "concepts/kv-cache.md"),
    ("continuous batching", "worker/step_loop.py", "concepts/continuous-batching.md"),
    ("batch invariance", "stages/batch_invariant_ops.py", "concepts/batch-invariance.md"),
    ("retraction", "stages/sequence_pool.py", "concepts/kv-cache.md"),
    ("tensor parallel", "parallel/parallel_plan.py", "guides/parallelism.md"),
    ("sequence parallel", "parallel/sequence.py", "guides/parallelism.md"),
    ("CFG parallel", "parallel/__init__.py", "guides/parallelism.md"),
    ("pipeline parallel", "parallel/spreading.py", "guides/parallelism.md"),
    ("FSDP", "parallel/spreading.py", "guides/parallelism.md"),
    ("LoRA adapter", "weights/adapters.py", "guides/adapters.md"),
    ("model swapping", "scheduler/model_swaps.py", "guides/model-swapping.md"),
    ("scale to zero", "k8s/objects.py", "guides/scale-to-zero.md"),
    ("cold start", "scheduler/cold_starts.py", "guides/scale-to-zero.md"),
    ("admission control", "scheduler/admission.py", "concepts/admission-control.md"),
    ("back-pressure", "scheduler/backpressure.py", "concepts/admission-control.md"),
    ("lease", "queues/tasks.py", "concepts/reliability.md"),
    ("heartbeat", "scheduler/dispatcher.py", "concepts/reliability.md"),
    ("dead letter", "server/dead_letters.py", "concepts/retries.md"),
    ("idempotency key", "server/calls.py", "concepts/reliability.md"),
    ("retry policy", "core/retries.py", "reference/errors.md"),
    ("checkpoint", "worker/checkpoints.py", "concepts/reliability.md"),
    ("drain", "service/stopping.py", "operations/drain.md"),
    ("VAE tiling", "parallel/tiles.py", "guides/parallelism.md"),
    ("offload", "weights/offload.py", "guides/devices.md"),
    ("attention backend", "stages/attention.py", "guides/dtypes.md"),
    ("quantization", "weights/quantized.py", "guides/quantization.md"),
    ("webhook", "server/webhooks.py", "guides/webhooks.md"),
)


def has(term: str, text: str) -> bool:
    """Whether a text has the term, with spaces, hyphens or underscores between its words, in the singular or plural."""
    words = re.split(r"[ -]", term.lower())
    return re.search(r"[ _-]?".join(map(re.escape, words)), text.lower()) is not None


def names_and_first_lines(path: Path) -> Iterator[str]:
    """The file's name, and the names and first docstring lines of all that it defines."""
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield (ast.get_docstring(node) or "").partition("\n")[0]


def headings_and_first_paragraphs(page: Path) -> Iterator[str]:
    """Every heading of a page, and the paragraph below it."""
    for section in re.split(r"^#+ ", page.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, rest = section.partition("\n")
        yield heading
        yield rest.strip().partition("\n\n")[0]


@pytest.mark.parametrize(("term", "file", "page"), TERMS, ids=[term for term, _, _ in TERMS])
def test_field_terms_are_used_in_their_code_file_and_docs_page(term: str, file: str, page: str) -> None:
    assert any(has(term, text) for text in names_and_first_lines(ROOT / "unfuse" / file)), file
    assert any(has(term, text) for text in headings_and_first_paragraphs(ROOT / "docs" / page)), page


#: Words of the first sentences of older docstrings, which gave processes human acts or left out the noun.
PRIVATE = re.compile(
    r"\b(tells?|told|hears?|heard|asks?|asked|says|said|knows|remembers?|borrow\w*|asleep|awake|sleeps"
    r"|gives? up|given up|goes on|go on|lies?|whoever|mates?|manned|beside)\b",
    re.IGNORECASE,
)
MAX_WORDS = 15


def first_sentences() -> Iterator[tuple[str, str]]:
    """Every first line of a docstring, with where it is."""
    for path in sorted((ROOT / "unfuse").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = getattr(node, "name", "the module")
                yield f"{path.relative_to(ROOT)}: {name}", (ast.get_docstring(node) or "").partition("\n")[0]


def test_first_lines_of_docstrings_are_short() -> None:
    assert {place: line for place, line in first_sentences() if len(line.split()) > MAX_WORDS} == {}


def test_first_lines_of_docstrings_have_no_private_words() -> None:
    found = {place: sorted({word.lower() for word in PRIVATE.findall(line)}) for place, line in first_sentences()}
    assert {place: words for place, words in found.items() if words} == {}


def test_private_words_are_recognized() -> None:
    assert PRIVATE.findall("Tells whoever asked what lies beside its mates.") == [
        "Tells",
        "whoever",
        "asked",
        "lies",
        "beside",
        "mates",
    ]
    assert not PRIVATE.findall("Return the earlier tasks of a worker that was listed.")


#: Words that say nothing as the name of anything in the code.
EMPTY_NAMES = frozenset(
    (
        "tell",
        "told",
        "hear",
        "heard",
        "take",
        "taken",
        "give",
        "given",
        "held",
        "keep",
        "kept",
        "settle",
        "begin",
        "grow",
    )
    + ("grown", "shown", "said", "found", "made", "own", "one", "such", "asleep", "manned")
)


def defined_names(tree: ast.Module) -> Iterator[str]:
    """The names of a module's functions, classes, constants, fields, parameters and local variables."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def test_defined_names_are_not_meaningless_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "unfuse").rglob("*.py"))
        for name in defined_names(ast.parse(path.read_text()))
        if name.strip("_").lower() in EMPTY_NAMES
    ]
    assert found == []


def test_meaningless_names_are_recognized() -> None:
    tree = ast.parse(
        "TOLD = 1\nclass Own:\n    held: int\n    def _take(self, kept): self.made = one = 1\nfound_files = 2"
    )
    assert {name for name in defined_names(tree) if name.strip("_").lower() in EMPTY_NAMES} == {
        "TOLD",
        "Own",
        "held",
        "_take",
        "kept",
        "made",
        "one",
    }


def undocumented_fields(source: str) -> Iterator[str]:
    """The fields of public structs and dataclasses without a `#:` line, a docstring, or a description in their type."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        kinds = [ast.unparse(kind) for kind in (*node.bases, *node.decorator_list)]
        if not any(re.search(r"\b(Struct|NamedTuple|dataclass)\b", kind) for kind in kinds):
            continue
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or ast.unparse(field.target).startswith("_"):
                continue
            has_line = lines[field.lineno - 2].strip().startswith("#:") or "  # " in lines[(field.end_lineno or 1) - 1]
            has_docstring = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if not (has_line or has_docstring or ast.unparse(field.annotation).startswith("Annotated")):
                yield f"{node.name}.{ast.unparse(field.target)}"


def test_fields_of_public_structs_are_documented() -> None:
    found = {
        str(path.relative_to(ROOT)): [*undocumented_fields(path.read_text())]
        for path in sorted((ROOT / "unfuse").rglob("*.py"))
    }
    assert {path: fields for path, fields in found.items() if fields} == {}


def test_undocumented_struct_fields_are_recognized() -> None:
    source = "@dataclass\nclass A:\n    #: x\n    a: int\n    b: int\n    c: int  # seconds\n    d: int\n    '''d'''\n"
    assert [*undocumented_fields(source)] == ["A.b"]


def test_exceptions_named_in_docstrings_exist() -> None:
    """Given "Raises X" in a docstring, or an error that a retry rule names, then X is a class that exists."""
    trees = {path: ast.parse(path.read_text()) for path in (ROOT / "unfuse").rglob("*.py")}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    known = {node.name for _, node in nodes if isinstance(node, ast.ClassDef)} | {*dir(builtins)}
    known |= {
        alias.asname or alias.name for _, node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }

    named = [
        (f"{path.relative_to(ROOT)}: {node.name}", name)
        for path, node in nodes
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for name in re.findall(r"\bRaises? ([A-Z][a-z]\w+)", ast.get_docstring(node) or "")
    ]
    named += [(rule.cause, name) for rule in RULES for name in re.findall(r"`([A-Z][a-z]\w*)`", rule.errors)]
    assert [(where, name) for where, name in named if name not in known] == []
    assert len(named) > 500


def test_quantize_and_tokenize_are_spelled_with_z() -> None:
    """Given text of the package and its documents, then no word has a spelling that a search would miss."""
    files = [*(ROOT / "unfuse").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    found = [
        f"{path.relative_to(ROOT)}: {word.group()}"
        for path in files
        for word in re.finditer(r"\w*(quantis|tokenis)\w*", path.read_text(), flags=re.IGNORECASE)
    ]
    assert found == []
