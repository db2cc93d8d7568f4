"""What a release is made of: its version, which other files name too, and the licences of what it installs."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib

import pytest
import yaml
from packaging.utils import canonicalize_name

import unfuse
from tools.bounds import name_of
from tools.licences import PAGE, Licence, row
from tools.packages import CONSTRAINTS, ROOT, next_release

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def listed(heading: str) -> dict[str, Licence]:
    """The rows of one of the page's tables, by name."""
    section = PAGE.read_text().split(f"\n## `{heading}`\n")[1].partition("\n## ")[0]
    rows = (Licence(*found) for found in re.findall(r"^\| (\S+) \| (\d\S*) \| (.+) \|$", section, re.MULTILINE))
    return {one.name: one for one in rows}


def direct(requirements: list[str]) -> set[str]:
    return {canonicalize_name(name_of(line)) for line in requirements}


def test_version_without_git_and_the_operator_manifest_name_the_next_release() -> None:
    version = PYPROJECT["tool"]["hatch"]["version"]
    assert (version["source"], version["fallback-version"]) == ("vcs", f"{next_release()}.dev0")
    manifest = yaml.safe_load_all((ROOT / "deploy/kubernetes/operator.yaml").read_text())
    (deployment,) = (one for one in manifest if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"unfuse:{next_release()}"
    assert f"--image={container['image']}" in container["args"]


def test_version_is_that_of_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unfuse.__version__ == importlib.metadata.version("unfuse")

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert unfuse.__version__ == "0+unknown"


def test_licences_page_lists_every_dependency_as_installed() -> None:
    """Of indirect ones, constraints.txt names few versions, so that another day has others."""
    project = PYPROJECT["project"]
    client, server = listed("unfuse"), listed("unfuse[serve]")
    assert direct(project["dependencies"]) <= client.keys()
    assert direct(project["optional-dependencies"]["serve"]) <= client.keys() | server.keys()
    assert not client.keys() & server.keys()
    pinned = {canonicalize_name(name_of(line)): line for line in CONSTRAINTS.read_text().splitlines() if "==" in line}
    for name, about in (client | server).items():
        if name in pinned:
            assert pinned[name].endswith(f"=={about.version}"), "python -m tools.licences"
            assert about == row(name), "python -m tools.licences"


def test_licences_page_names_the_gpl_code_in_pyav() -> None:
    assert re.search(r"\*\*av\*\*.*x264.*GPL", PAGE.read_text())
