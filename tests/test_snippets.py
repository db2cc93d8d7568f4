"""What the documents have people type is understood, and what they link to is there.

Pages whose snippets are run are listed in tests/integration/test_howtos.py, and with the tests that run single ones.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from tools.pages import parse_command, snippet_problems
from tools.snippets import PAGES, ROOT, blocks, commands, page_id
from unfuse.cli.app import app

EXTRAS = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_code_blocks_of_pages_parse(page: Path) -> None:
    assert list(snippet_problems(page)) == []
    typed = [" ".join(words) for block in blocks(page) for words in commands(block)]
    for extras in re.findall(r"(?:unfuse|\.)\[([\w,]+)\]", " ".join(typed)):
        assert set(extras.split(",")) <= EXTRAS


def test_unknown_commands_and_flags_in_pages_are_detected() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse_command(["serve", "--no-such-flag"])
    with pytest.raises(KeyError):
        parse_command(["keys", "lose"])


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub has them in addresses."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_in_pages_resolve(page: Path) -> None:
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_flags_named_in_pages_exist() -> None:
    """In backticks at the beginning, as `--threads 1`."""
    root = typer.main.get_command(app)
    verbs = [root, *root.commands.values()]  # type: ignore[attr-defined]
    verbs += [inner for verb in verbs for inner in getattr(verb, "commands", {}).values()]
    options = [option for verb in verbs for option in verb.params]
    known = {flag for option in options for flag in (*option.opts, *option.secondary_opts)} | {"--help"}
    others = {"builtin-model.md", "builtin-model-training.md"}
    # performance pages and those of the built-in model name flags of other commands
    for page in (page for page in PAGES if page.parent.name != "performance" and page.name not in others):
        named = set(re.findall(r"`(--[a-z][a-z0-9-]+)", page.read_text()))
        assert named - known - {"--no-deps", "--constraint", "--user", "--sharpness", "--skip-crds"} == set(), page.name


def test_readme_reading_time_is_at_most_five_minutes() -> None:
    """Aloud, by 190 words a minute, a brisk pace, without code, addresses and rules of tables."""
    text = (ROOT / "README.md").read_text()
    prose = re.sub(r"^    .*$|\]\([^)]*\)|^[|-]+$|`", " ", text, flags=re.MULTILINE)
    assert text.count("\n") <= 120
    assert len(re.findall(r"[^\W_][\w.'’/-]*", prose)) <= 5 * 190
