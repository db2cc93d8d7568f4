"""The checks of the pages of the site find each kind of problem, and name the file and the line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tools import pages
from tools.pages import MAX_SENTENCE, MAX_WORDS, Problem, parameter_problems, problems, sentences, site_problems
from tools.snippets import DOCS, ROOT
from unfuse.core.modalities import IMAGE

NEXT = "\nNext: [Install unfuse](start/install.md)\n"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A page of a site in another folder."""
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    return tmp_path / "docs" / "page.md"


def found(page: Path, text: str) -> list[str]:
    page.write_text(text)
    return [f"{problem.page.name}:{problem.line}: {problem.message}" for problem in problems(page)]


def test_all_pages_of_the_site_have_no_problems() -> None:
    assert [*map(str, site_problems())] == []


def test_good_page_has_no_problems(page: Path) -> None:
    assert found(page, "# Title\n\nA sentence.\n\n```bash\nunfuse serve\n```\n" + NEXT) == []


def test_page_over_its_length_is_a_problem(page: Path) -> None:
    (only,) = found(page, "# Title\n" + "\nA short sentence.\n" * (MAX_WORDS // 3 + 1) + NEXT)
    assert only.startswith("page.md:1: the page has 1,5")


def test_long_sentence_is_a_problem_with_its_line(page: Path) -> None:
    longest = " ".join(["word"] * MAX_SENTENCE)
    assert found(page, f"# Title\n\nA sentence. And\n{longest}.\n" + NEXT) == [
        f"page.md:3: a sentence of {MAX_SENTENCE + 1} words; the most is {MAX_SENTENCE}"
    ]
    assert found(page, f"# Title\n\n{longest}.\n" + NEXT) == []


def test_code_tables_and_targets_of_links_are_no_words_of_sentences(page: Path) -> None:
    words = " ".join(["word"] * (MAX_SENTENCE + 1))
    text = (
        f"# Title\n\n```text\n{words}\n```\n\n| {words} |\n|---|\n\nA [link]({words.replace(' ', '/')}) of `{words}`.\n"
    )
    assert found(page, text + NEXT) == []
    assert [line for line, _ in sentences(text)] == [1, 10]


def test_page_without_next_step_is_a_problem(page: Path) -> None:
    assert found(page, "# Title\n\nA sentence.\n") == [
        "page.md:3: the page does not end with a next step: `Next: [title](page.md)`"
    ]


@pytest.mark.parametrize(
    ("snippet", "message"),
    [
        ("unfuse serve --no-such-flag", "the snippet does not parse: No such option: --no-such-flag"),
        ("import unfuse\nunfuse.local(", "the snippet does not parse: '(' was never closed"),
        ("something else", "neither a command nor a program: 'something else'"),
    ],
)
def test_snippet_that_does_not_parse_is_a_problem_with_its_line(page: Path, snippet: str, message: str) -> None:
    page.write_text(f"# Title\n\nA sentence.\n\n```text\n{snippet}\n```\n{NEXT}")
    (problem,) = pages.snippet_problems(page)
    assert (problem.line, problem.message[: len(message)]) == (6, message)


def test_parameter_without_description_is_a_problem_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = [msgspec.structs.replace(one, description="") if one.name == "seed" else one for one in IMAGE.parameters]
    monkeypatch.setattr(pages, "MODALITIES", [msgspec.structs.replace(IMAGE, parameters=tuple(bare))])
    (problem,) = parameter_problems()
    assert (problem.page.name, problem.message) == ("modalities.py", "the parameter seed has no description")
    assert '"seed"' in "".join(problem.page.read_text().splitlines()[problem.line - 1 : problem.line + 2])


def test_problem_is_printed_with_its_path_and_line() -> None:
    assert str(Problem(ROOT / "docs" / "index.md", 3, "a message")) == "docs/index.md:3: a message"


def test_site_build_fails_for_broken_links(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "index.md").write_text("# Title\n\n```{toctree}\npage\n```\n")
    links = "A [page](missing.md).\n\nA [heading](#missing).\n\nA [file](../missing.py).\n"
    (tmp_path / "source" / "page.md").write_text(f"# Title\n\n{links}")
    command = ("sphinx", "-b", "html", "-q", "--fail-on-warning", "--keep-going", "-c", DOCS, tmp_path / "source")
    done = subprocess.run(
        [sys.executable, "-m", *command, tmp_path / "site"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "page.md:3: WARNING: 'myst' cross-reference target not found: 'missing.md'" in done.stderr
    assert "page.md:5: WARNING: 'myst' cross-reference target not found: 'missing'" in done.stderr
    assert "page.md:7: WARNING: the link target ../missing.py does not exist" in done.stderr
