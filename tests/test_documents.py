"""What the documents say is so: extras, files, metrics, error codes, numbers and targets of make that they name.

The other side of each comparison is the code, or a table in this file; no page is compared with another page.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tools.reference_errors import refusals
from tools.snippets import DOCS, PAGES, ROOT, blocks, commands, page_id
from unfuse.client import calls
from unfuse.core import parameters, pixels
from unfuse.edge import connections, keys
from unfuse.language.answer_reader import CALL_FORMATS, REASONING_FORMATS
from unfuse.language.tools import MAX_TOOLS
from unfuse.models import FAMILIES
from unfuse.queues.base import MAX_CACHED
from unfuse.scheduler.maintenance import GONE, RETURN_S
from unfuse.server import body, links, multimodal_messages as chats, outbound_http
from unfuse.server.metrics_table import METRICS
from unfuse.server.openapi_schemas import REQUEST, STAGE
from unfuse.transfer import BACKENDS

WHEEL = r"\$\(ls dist/unfuse-\*\.whl\)"
"""The wheel of `make dist`, whose name has the version, in a command of a shell."""

INSTALLED = re.compile(rf"pip install (?:\S+ )*'?(?:\.|{WHEEL})\[([\w,]+)\]")
"""A command that installs unfuse with extras, from a clone or from its wheel. It is on no index yet."""

NEEDED = {
    r"\brediss?(\+sentinel|\+cluster)?://": "redis",
    r"\bs3://": "s3",
    r"--loras\b": "lora",
    r"--launcher ray\b": "ray",
    r"--engine \S*mooncake\b": "mooncake",
    r"--engine \S*nixl\b": "nixl",
    r"\bunfuse operator\b": "operator",
}
"""The extra without which a command or a setting that contains this is refused."""


def needed_by(block: str) -> set[str]:
    """The extras that a block's commands and settings need; what helm and kubectl start has an image with all."""
    lines = re.sub(r"\\\n\s*", " ", block).splitlines()
    ours = [line for line in lines if re.match(r"(\S*/)?unfuse |UNFUSE_", line)]
    return {extra for sign, extra in NEEDED.items() for line in ours if re.search(sign, line)}


def lacking(page: Path) -> set[str]:
    """The extras that a page needs and does not install; one that installs no server has to name them."""
    needed = set().union(*(needed_by(block) for block in blocks(page)))
    typed = [" ".join(words) for block in blocks(page) for words in commands(block)]
    servers = [found[1].split(",") for line in typed if (found := INSTALLED.search(line)) and "serve" in found[1]]
    named = re.findall(r"(?:unfuse|\.)\[([\w,]+)\]", page.read_text())
    return needed - {extra for extras in servers or [one.split(",") for one in named] for extra in extras}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_pages_install_the_extras_their_commands_need(page: Path) -> None:
    assert lacking(page) == set()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_pages_never_install_unfuse_from_a_package_index(page: Path) -> None:
    """unfuse is installed from a clone, whose folder is named as `.`, or from the wheel that `make dist` makes."""
    typed = [words for block in blocks(page) for words in commands(block) if words[0].endswith("pip")]
    assert [words for words in typed if any(re.match(r"unfuse\b", word) for word in words)] == []
    named = [word for words in typed for word in words if ".whl" in word]
    assert [word for word in named if not re.fullmatch(rf"{WHEEL}\[[\w,]+\]|dist/unfuse-\*\.whl", word)] == []


def test_extras_in_install_commands_of_pages_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    typed = [" ".join(words) for page in PAGES for block in blocks(page) for words in commands(block)]
    named = [found[1] for line in typed if (found := INSTALLED.search(line))]
    assert named and {extra for one in named for extra in one.split(",")} <= extras.keys()


def test_missing_extras_of_a_page_are_detected(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("\n\n    bin/pip install '.[serve]'\n\n    UNFUSE_SERVE__QUEUE=redis://10.0.0.1:6379/0\n\n")
    assert lacking(page) == {"redis"}

    page.write_text(
        '\n\n    pip install "$(ls dist/unfuse-*.whl)[serve,redis]"\n\n    unfuse serve --queue redis://h:1\n\n'
    )
    assert lacking(page) == set()

    page.write_text("`pip install 'unfuse[redis]'`\n\n    unfuse serve --queue redis+sentinel://h:1/a --loras /l\n\n")
    assert lacking(page) == {"lora"}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_and_tests_named_in_pages_exist(page: Path) -> None:
    """In backticks, with a folder: `tools/tiny.py`, or `tests/stores/test_spill.py::test_name`."""
    places = [page.parent, *(ROOT / folder for folder in ("", "unfuse", "docs", "tests"))]
    named = re.findall(r"`([a-z][\w.-]*/[\w./-]+\.(?:py|md|ya?ml|json|sh|service|lua))(?:::(\w+))?`", page.read_text())
    for path, test in named:
        found = [place / path for place in places if (place / path).exists()]
        assert found, path
        assert not test or f"def {test}(" in found[0].read_text(), f"{path}::{test}"


@cache
def metrics() -> set[str]:
    """The names of all metrics."""
    return {spec.name for spec in METRICS}


@cache
def codes() -> set[tuple[int, str]]:
    """All statuses of errors, with their codes."""
    return {(status, name) for name, statuses in refusals().items() for status in statuses}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_metrics_named_in_pages_are_exported(page: Path) -> None:
    named = {
        re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bunfuse_[a-z_]*[a-z]\b", page.read_text())
    }
    assert named - metrics() == set()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_error_codes_named_in_pages_have_the_stated_status(page: Path) -> None:
    """As in 409 `model_exists`."""
    named = {(int(status), name) for status, name in re.findall(r"\b([45]\d\d) `([a-z_]+)`", page.read_text())}
    assert named - codes() == set()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_named_in_pages_exist(page: Path) -> None:
    rules = re.findall(r"^([a-z ]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"(?:`|^    )make ([a-z]+)", page.read_text(), re.MULTILINE))
    assert named <= {target for rule in rules for target in rule.split()}


def family_page(name: str) -> str:
    """The guide that lists a model family."""
    if name.endswith("Pipeline"):
        return "models"
    return "vision" if "VL" in name else "chats"


MIB = 1 << 20
FACTS = [
    (
        "guides/client-limits.md",
        f"at most {body.MAX_BODY // MIB} MiB; {body.MAX_MEDIA_BODY // MIB} MiB where it may hold pictures",
    ),
    ("guides/client-limits.md", f"values in a body | at most {body.MAX_VALUES:,}"),
    ("guides/client-limits.md", f"at most {connections.MAX_HEADERS} headers, {connections.MAX_HEAD >> 10} KiB, and"),
    ("guides/client-limits.md", f"{connections.MAX_TARGET >> 10} KiB of address"),
    ("guides/vision.md", f"at most {chats.MAX_FETCHED} a chat, of {body.MAX_BYTES // MIB} MiB, within"),
    ("guides/vision.md", f"may show {chats.MAX_MEDIA} pictures and videos of {body.MAX_BYTES // MIB} MiB and"),
    (
        "guides/vision.md",
        f"a body of {body.MAX_MEDIA_BODY // MIB} MiB, and {chats.MAX_PIXELS // 10**6} million pixels",
    ),
    (
        "guides/vision.md",
        f"at most {chats.MAX_FRAMES:,} frames, and 10¹⁰ pixels" * (chats.MAX_VIDEO_PIXELS == 10**10),
    ),
    (
        "guides/input-pictures.md",
        f"{pixels.MAX_SIDE:,} pixels a side and {pixels.MAX_PIXELS // 10**6} million in all",
    ),
    ("guides/input-pictures.md", f"a `data:` URL (of {body.MAX_MEDIA_BODY // MIB} MiB of JSON)"),
    ("guides/keys.md", f"of at least {keys.MIN_KEY_CHARS} characters"),
    ("guides/client-limits.md", "without a key for an hour" * (links.LINK_TTL_S == 3600)),
    (
        "guides/client-limits.md",
        "Links in webhook messages are valid for a day" * (links.WEBHOOK_LINK_TTL_S == 86400),
    ),
    (
        "operations/security.md",
        "read one result for an hour (a day in webhooks)"
        * (links.LINK_TTL_S * 24 == links.WEBHOOK_LINK_TTL_S == 86400),
    ),
    ("operations/security.md", "six formats only" * (len(pixels.FORMATS) == 6)),
    ("guides/webhooks.md", f"does not answer 2xx within {outbound_http.CALL_S:.0f} s"),
    ("guides/adapters.md", "adapters of the folder, up to eight," * (parameters.MAX_SCALED_NAMES == 8)),
    ("concepts/reliability.md", f"after {RETURN_S:.0f} s if its connection closed"),
    ("concepts/reliability.md", f"silent for {GONE} lease times"),
    ("architecture.md", f"at most {MAX_CACHED} entries"),
    *((f"guides/{family_page(name)}.md", f"`{name}`" if name.endswith("Pipeline") else name) for name in FAMILIES),
    *(("guides/transfer-engines.md", f"| `{name}`") for name in BACKENDS),
    ("guides/tool-calls.md", f"up to {MAX_TOOLS} functions"),
    *(("guides/tool-calls.md", f"| `{name}` |") for name in CALL_FORMATS),
    *(("guides/tool-calls.md", f"`{name}`") for name in REASONING_FORMATS),
    ("guides/python-client.md", f"silent event stream | {calls.TIMEOUT_S:.0f} s, then"),
    ("guides/python-client.md", f"| {calls.RECONNECTS} attempts in a row without a new event"),
    ("guides/python-client.md", "| an hour, since" * (calls.ADD_TIMEOUT_S == 3600)),
]
"""Sentences with the numbers and names that the code has. A number in words is there only if the code's is the same."""


@pytest.mark.parametrize(("page", "sentence"), FACTS)
def test_numbers_and_names_in_pages_match_the_code(page: str, sentence: str) -> None:
    assert sentence and sentence in " ".join((DOCS / page).read_text().split())


def test_fields_explained_for_slow_requests_are_in_the_schemas() -> None:
    text = (DOCS / "operations" / "slow-requests.md").read_text()
    part = text.partition("## What the fields mean")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
    fields = {name.removeprefix("stages[].") for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    assert len(fields) > 15
    assert fields - {*REQUEST["properties"], *STAGE["properties"]} == set()
