"""Check the pages of the site: length, sentences, next steps, snippets. `python -m tools.pages` lists the problems.

Problems have the file and the line. `make docs` reports them as warnings, and fails with any warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import typer.main

from tools.snippets import DOCS, PAGES, ROOT, blocks, commands, is_python
from unfuse.cli.app import app
from unfuse.core.modalities import MODALITIES

#: The most words of a page, and of a sentence.
MAX_WORDS, MAX_SENTENCE = 1500, 40

#: Folders and files whose pages may be longer: readers look things up there and do not read them from top to bottom.
LONG = ("docs/reference/", "docs/log.md", "docs/decisions/")

#: Pages that are lists of what was or will be, without a next step.
RECORDS = ("docs/roadmap.md", "docs/contributing/changelog.md")

FENCE = re.compile(r"^(```|:::).*?^\1$", re.MULTILINE | re.DOTALL)
#: The beginnings of blocks that are neither commands nor whole programs: each is compared with the code by a test of
#: its own, or shows what diffusers is called with.
OTHERWISE = (
    "models: [Wan-AI",
    "pipeline:\n",
    "podTemplate:\n",
    "server {",
    "redis-cli ACL",
    "sum by (tenant)",
    "sum by (model, device)",
    "helm -n unfuse install",
    "UNFUSE_SERVE__MODELS=",
    "UNFUSE_WORKER__SCHEDULER=",
    "[Service]",
    "[serve]",
    "NAME sha256:HEX [admin=yes]",
    "a|an COLOUR SHAPE",
    'Parameter("sharpness"',
    "cli\n",
    "id: 1\nevent: ",
    "generator = torch.Generator",
    'pipeline.load_lora_weights("ink',
)

SENTENCE = re.compile(r"\S.*?(?:[.!?:](?=\s)|(?=\n\s*(?:\n|[-*#] |\d+\. ))|\Z)", re.DOTALL)
WORD = re.compile(r"[^\W_][\w.'’/-]*")


@dataclass(frozen=True)
class Problem:
    """What is wrong with a page."""

    page: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.message}"


def prose(text: str) -> str:
    """Return a page's text with blank lines in place of code blocks, directives, comments and rows of tables."""

    def blanked(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n")

    text = FENCE.sub(blanked, text)
    text = re.sub(r"<!--.*?-->", blanked, text, flags=re.DOTALL)
    return re.sub(r"^\|.*$|^\([\w-]+\)=$", "", text, flags=re.MULTILINE)


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """The sentences of a page's prose, each with the line where it begins.

    A heading, an item of a list, and what stands before a colon are sentences of their own.
    """
    text = prose(text)
    for found in SENTENCE.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, found[0]


def words(sentence: str) -> int:
    """Return the number of words of a sentence. A piece of code is one word, and the target of a link is none."""
    sentence = re.sub(r"\]\([^)]*\)", "]", sentence)
    return len(WORD.findall(re.sub(r"`[^`]*`", "code", sentence)))


def problems(page: Path) -> Iterator[Problem]:
    """Check one page."""
    text = page.read_text()
    name = str(page.relative_to(ROOT))

    number = len(WORD.findall(FENCE.sub("", text)))
    if number > MAX_WORDS and not name.startswith(LONG):
        yield Problem(page, 1, f"the page has {number:,} words; split it, so that each has at most {MAX_WORDS:,}")

    for line, sentence in sentences(text):
        if words(sentence) > MAX_SENTENCE:
            yield Problem(page, line, f"a sentence of {words(sentence)} words; the most is {MAX_SENTENCE}")

    last = text.rstrip().rpartition("\n\n")[2]
    if name.startswith("docs/") and name not in RECORDS and not re.search(r"^Next: .*\]\(", last, re.MULTILINE):
        yield Problem(page, text.count("\n"), "the page does not end with a next step: `Next: [title](page.md)`")


def snippet_problems(page: Path) -> Iterator[Problem]:
    """Check the code blocks of a page: commands by the command line of unfuse, Python by its compiler."""
    text = page.read_text()
    for block in blocks(page):
        line = text.count("\n", 0, text.find(block.partition("\n")[0])) + 1
        try:
            typed = list(commands(block))
            if is_python(block):
                compile(block, page.name, "exec")
            elif not typed and not block.lstrip(" ").startswith(OTHERWISE):
                yield Problem(page, line, f"neither a command nor a program: {block[:40]!r}")
            for program, *arguments in typed:
                if program.rpartition("/")[2] == "unfuse":
                    parse_command(arguments)
        except Exception as error:
            yield Problem(page, line, f"the snippet does not parse: {error}")


def parse_command(arguments: list[str]) -> None:
    """Have the command line of unfuse read a command. Raises the error that a user would get."""
    command, name = typer.main.get_command(app), "unfuse"
    while hasattr(command, "commands") and arguments:
        name, *arguments = arguments
        command = command.commands[name]
    command.make_context(name, arguments)


def parameter_problems() -> Iterator[Problem]:
    """Find the request parameters that have a use, but no description."""
    for modality in MODALITIES:
        for parameter in modality.parameters:
            if parameter.use not in ("nothing", "unused") and not parameter.description:
                yield Problem(*place_of(parameter.name), f"the parameter {parameter.name} has no description")


def route_problems() -> Iterator[Problem]:
    """Find the parameters of routes that have no description; each with the line of its route."""
    from tools.reference_http import undescribed  # with the packages of a server

    for place in undescribed():
        yield Problem(*place)


def place_of(parameter: str) -> tuple[Path, int]:
    """Return the file and the line that define a request parameter."""
    for path in sorted((ROOT / "unfuse" / "core").glob("*.py")):
        text = path.read_text()
        if found := re.search(rf'Parameter\(\s*"{parameter}"', text):
            return path, text.count("\n", 0, found.start()) + 1
    raise LookupError(parameter)


def site_problems() -> Iterator[Problem]:
    """Check all pages of the site, and what generated pages are made from."""
    yield from parameter_problems()
    yield from route_problems()
    for page in PAGES:
        if page.is_relative_to(DOCS):
            yield from problems(page)
            yield from snippet_problems(page)


if __name__ == "__main__":
    for problem in site_problems():
        print(problem)
    lengths = [words(one) for page in PAGES for _, one in sentences(page.read_text()) if words(one) > 1]
    print(f"{len(PAGES)} pages, {len(lengths):,} sentences of {mean(lengths):.1f} words, the longest {max(lengths)}")
