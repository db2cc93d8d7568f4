"""One list of Debian packages for `make test` and CI: what is missing is named, and installed only by who may."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ["chromium", "iproute2", "libibverbs1", "nginx-light", "openssl", "redis-server"]


def ran(folder: Path, **commands: str) -> subprocess.CompletedProcess[str]:
    """The script where there are no commands but these, each a line of shell."""
    for name, body in ({"ldconfig": "true", "grep": "false"} | commands).items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    script = (ROOT / "tools" / "system_packages.sh").read_text().replace(":/usr/sbin:/sbin", "")
    (folder / "script.sh").write_text(script)
    bash = shutil.which("bash") or "/bin/bash"
    return subprocess.run([bash, "script.sh"], cwd=folder, env={"PATH": str(folder)}, capture_output=True, text=True)


def test_missing_packages_are_listed_and_skipped_without_root(tmp_path: Path) -> None:
    done = ran(tmp_path, id="echo 1000", sudo="exit 1", **{"apt-get": "touch installed"})

    assert done.returncode == 0, done.stderr
    assert [line.split()[2].rstrip(",") for line in done.stdout.splitlines()[:-1]] == PACKAGES
    assert "skipped" in done.stdout.splitlines()[-1]
    assert not (tmp_path / "installed").exists()


def test_only_missing_packages_are_installed_as_root(tmp_path: Path) -> None:
    there = {"chromium": "true", "nginx": "true", "ip": "true", "true": "exit 0"}
    env = 'while [[ $1 == *=* ]]; do shift; done; "$@"'
    done = ran(tmp_path, id="echo 0", env=env, **there, **{"apt-get": 'echo "$@" >> asked'})

    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0].startswith("update")
    assert asked[1].split()[-3:] == ["libibverbs1", "openssl", "redis-server"]


def test_ci_and_makefile_have_no_package_list_of_their_own() -> None:
    for path in (ROOT / ".ci" / "run", ROOT / "Makefile"):
        assert not [package for package in PACKAGES if package in path.read_text()]
    assert os.access(ROOT / "tools" / "system_packages.sh", os.X_OK)
