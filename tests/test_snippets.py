"""What the documents have people type is understood, and what they link to is there.

Pages whose snippets are run are listed in tests/integration/test_howtos.py, and with the tests that run single ones.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from tools.snippets import PAGES, ROOT, blocks, commands, is_python
from unfuse.cli.app import app

EXTRAS = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))

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
    "generator = torch.Generator",
    'pipeline.load_lora_weights("ink',
)
"""The beginnings of blocks that are neither commands nor whole programs: each is held to the code by a test of its own,
or shows what diffusers is called with."""


def understood(words: list[str]) -> None:
    """Have the real command line read a command. Raises what a person would be told."""
    command, name = typer.main.get_command(app), "unfuse"
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]  # type: ignore[attr-defined]
    command.make_context(name, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_of_pages_parse(page: Path) -> None:
    for block in blocks(page):
        typed = list(commands(block))
        if is_python(block):
            compile(block, page.name, "exec")
        elif not typed:
            assert block.lstrip(" ").startswith(OTHERWISE), block
        for program, *words in typed:
            if program.rpartition("/")[2] == "unfuse":
                understood(words)
            for extras in re.findall(r"(?:unfuse|\.)\[([\w,]+)\]", " ".join(words)):
                assert set(extras.split(",")) <= EXTRAS


def test_unknown_commands_and_flags_in_pages_are_detected() -> None:
    with pytest.raises(Exception, match="No such option"):
        understood(["serve", "--no-such-flag"])
    with pytest.raises(KeyError):
        understood(["keys", "lose"])


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub has them in addresses."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_in_pages_resolve(page: Path) -> None:
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_flags_named_in_pages_exist() -> None:
    """In backticks at the beginning, as `--threads 1`."""
    verbs = [*typer.main.get_command(app).commands.values()]  # type: ignore[attr-defined]
    verbs += [inner for verb in verbs for inner in getattr(verb, "commands", {}).values()]
    options = [option for verb in verbs for option in verb.params]
    known = {flag for option in options for flag in (*option.opts, *option.secondary_opts)} | {"--help"}
    for page in (
        page for page in PAGES if page.name not in ("performance.md", "builtin-model.md")
    ):  # of other commands
        named = set(re.findall(r"`(--[a-z][a-z0-9-]+)", page.read_text()))
        assert named - known - {"--no-deps", "--constraint", "--user", "--sharpness", "--skip-crds"} == set(), page.name


def test_readme_reading_time_is_at_most_five_minutes() -> None:
    """Aloud, by 190 words a minute, a brisk pace, without code, addresses and rules of tables."""
    text = (ROOT / "README.md").read_text()
    prose = re.sub(r"^    .*$|\]\([^)]*\)|^[|-]+$|`", " ", text, flags=re.MULTILINE)
    assert text.count("\n") <= 120
    assert len(re.findall(r"[^\W_][\w.'’/-]*", prose)) <= 5 * 190
