"""`unfuse keys`: what it prints, what it writes, and what it leaves as it was."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from unfuse.cli.main import run
from unfuse.core.errors import ConfigError, UsageError
from unfuse.core.request import TenantLimits
from unfuse.edge.keys import ApiKey, ApiKeys, add_key, hash_keys

Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Typed:
    """Run `unfuse keys`; returns exit code, standard output, standard error."""
    monkeypatch.setenv("UNFUSE_DATA_DIR", str(tmp_path / "data"))

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            run(["keys", *arguments])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_keys_add_prints_the_key_once_and_stores_only_its_hash(typed: Typed, tmp_path: Path) -> None:
    file = tmp_path / "data" / "api-keys"
    code, out, err = typed("add", "ada", "--rate", "60/min", "--concurrent", "2", "--models", "m")
    ada = out.strip()
    assert code == 0 and out == f"{ada}\n" and len(ada) >= 40
    assert f"--api-keys {file}" in err and ada not in err
    root = typed("add", "root", "--admin")[1].strip()
    see = typed("add", "see", "--read")[1].strip()

    assert file.read_text() == (
        f"ada sha256:{sha(ada)} models=m rate=60/min concurrent=2\n"
        f"root sha256:{sha(root)} admin=yes\nsee sha256:{sha(see)} read=yes\n"
    )
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    keys = ApiKeys(files=[str(file)])
    assert keys.find(ada) == ApiKey("ada", models=frozenset({"m"}), limits=TenantLimits(2, 60, 60))
    assert (keys.find(root), keys.find(see)) == (ApiKey("root", admin=True), ApiKey("see", read_only=True))
    assert keys.warning == ""


def test_keys_ls_lists_keys_without_secrets(typed: Typed, tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text("# studio\nbob plain-key-of-bob read=yes models=b,a\nbare-key\n")
    root = typed("add", "root", "--admin", "--rate", "5/s", "--concurrent", "3", "--file", str(file))[1].strip()
    code, out, err = typed("ls", "--file", str(file))
    assert (code, err) == (0, "")
    head, *lines = out.splitlines()
    assert head.split() == ["NAME", "HASH", "ADMIN", "READ", "MODELS", "RATE", "CONCURRENT", "STORED", "AS"]
    assert lines[0].split() == [
        "bob",
        sha("plain-key-of-bob")[:8],
        *["no", "yes", "a,", "b", "-", "-", "plain", "text"],
    ]
    assert lines[1].split() == ["default", sha("bare-key")[:8], *["no", "no", "-", "-", "-", "plain", "text"]]
    assert lines[2].split() == ["root", sha(root)[:8], *["yes", "no", "-", "5/s", "3", "hash"]]
    rows = json.loads(typed("ls", "--file", str(file), "--json")[1])
    assert [row["name"] for row in rows] == ["bob", "default", "root"]
    for secret in ("plain-key-of-bob", "bare-key", root, sha(root)[:12]):
        assert secret not in out + str(rows)


def test_keys_rm_removes_by_name_or_hash_and_preserves_other_lines(typed: Typed, tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_bytes(b"# studio\r\n\nada  k1\nada k2\nbob\tk3\n# end")
    assert typed("rm", sha("k2")[:8], "--file", str(file)) == (0, f"ada {sha('k2')[:8]}\n", f"removed from {file}\n")
    assert file.read_bytes() == b"# studio\r\n\nada  k1\nbob\tk3\n# end"
    typed("add", "bob", "--file", str(file))
    code, out, _ = typed("rm", "bob", "--file", str(file))
    assert code == 0 and out.startswith(f"bob {sha('k3')[:8]}\nbob ")
    assert file.read_bytes() == b"# studio\r\n\nada  k1\n# end\n"


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("eve", "no key in .* has the name 'eve'.*`unfuse keys ls`"),
        ("zz99", "no key in"),
        ("", "no key in"),
        ("sha256:", "no key in"),
        ("012", "no key in"),
        ("0123", "2 keys in .* have a hash that begins with 0123"),
        ("0123456789ab", "2 keys in .* have a hash that begins"),
        ("feed", "is both a name and the beginning of a hash"),
    ],
)
def test_keys_rm_rejects_an_unknown_or_ambiguous_key(typed: Typed, tmp_path: Path, which: str, said: str) -> None:
    text = f"ada sha256:0123456789ab{'0' * 52}\nbob sha256:0123456789ab{'1' * 52}\nfeed k\ncy sha256:feed{'0' * 60}\n"
    (file := tmp_path / "keys").write_text(text)
    code, out, err = typed("rm", which, "--file", str(file))
    assert (code, out, file.read_text()) == (2, "", text)
    assert re.search(said, err)


def test_keys_rm_rejects_removing_the_last_key(typed: Typed, tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text("ada k1\nada k2\n")
    code, _, err = typed("rm", "ada", "--file", str(file))
    assert code == 2 and "add another key first" in err
    assert file.read_text() == "ada k1\nada k2\n"


def test_keys_hash_replaces_only_plain_keys_by_their_hashes(typed: Typed, tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_bytes(
        b"# keys of the studio\r\n\nanna   anna-anna-anna-anna  rate=60/min\r\n"
        b"root sha256:" + b"A" * 64 + b" admin=yes\n\tbare-bare-bare-bare\nbert short"
    )
    file.chmod(0o640)
    code, out, err = typed("hash", str(file))
    assert (code, out) == (0, "")
    assert "replaced 3 plain keys by their hashes" in err and "short keys can be guessed" in err and "bert" in err
    assert "anna" not in err.partition("guessed")[2] and "anna-anna" not in err
    anna, bare, bert = (sha(key).encode() for key in ("anna-anna-anna-anna", "bare-bare-bare-bare", "short"))
    assert file.read_bytes() == (
        b"# keys of the studio\r\n\nanna   sha256:" + anna + b"  rate=60/min\r\n"
        b"root sha256:" + b"A" * 64 + b" admin=yes\n\tsha256:" + bare + b"\nbert sha256:" + bert
    )
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    keys = ApiKeys(files=[str(file)])
    assert keys.find("anna-anna-anna-anna") == ApiKey("anna", limits=TenantLimits(0, 60, 60))
    assert keys.find("bare-bare-bare-bare") == ApiKey("default") and keys.warning == ""

    before = written(file)
    assert "has no plain key" in typed("hash", str(file))[2]
    assert written(file) == before
    assert [*tmp_path.iterdir()] == [file]


def written(file: Path) -> tuple[bytes, int, int, int]:
    """What a write changes: reading a file changes when it was last read."""
    state = file.stat()
    return file.read_bytes(), state.st_ino, state.st_mtime_ns, state.st_ctime_ns


def test_keys_hash_preserves_a_symlinked_key_file(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (real := tmp_path / "real" / "keys").write_text("ada plain-key-of-ada\n")
    (link := tmp_path / "link").symlink_to(real)
    assert typed("hash", str(link))[0] == 0
    assert link.is_symlink() and real.read_text() == f"ada sha256:{sha('plain-key-of-ada')}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hash", "{}"], "there is no key file {}"),
        (["ls", "--file", "{}"], "there is no key file {}"),
        (["rm", "ada", "--file", "{}"], "there is no key file {}"),
        (["hash", "{}/deeper"], "there is no key file {}/deeper"),
        (["add", "two words", "--file", "{}"], "NAME must have 1 to 64 letters"),
        (["add", "ada", "--rate", "often", "--file", "{}"], "unfuse: --rate often: rate must be like 10/s"),
        (["add", "ada", "--models", "a b", "--file", "{}"], "--models 'a b' has spaces: write several models as a,b"),
        (["add", "ada", "--models", "a admin=yes", "--file", "{}"], "--models 'a admin=yes' has spaces"),
        (["add", "ada", "--rate", "1/s\u2028root", "--file", "{}"], "has spaces"),
    ],
)
def test_failing_keys_commands_print_one_line_and_create_no_file(
    typed: Typed, tmp_path: Path, arguments: list[str], said: str
) -> None:
    missing = str(tmp_path / "missing")
    code, out, err = typed(*(one.format(missing) for one in arguments))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said.format(missing) in err
    assert [*tmp_path.iterdir()] == []


def test_added_line_uses_the_line_endings_of_the_key_file(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_bytes(b"ada k1\r\nbob k2")
    add_key(file, "eve", {})
    assert re.fullmatch(rb"ada k1\r\nbob k2\r\neve sha256:[0-9a-f]{64}\r\n", file.read_bytes())


@pytest.mark.parametrize("name", ["", "two words", "a=b", "x" * 65, "a\nb", "sha256:0"])
def test_add_key_rejects_invalid_key_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="NAME must have"):
        add_key(tmp_path / "keys", name, {})


def test_add_key_rejects_limits_that_conflict_with_other_lines(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text("ada k1 rate=1/s")
    with pytest.raises(UsageError, match=r"line 2: ada has other limits on another line .*keys, line 1"):
        add_key(file, "ada", {})
    assert file.read_text() == "ada k1 rate=1/s" and [*tmp_path.iterdir()] == [file]
    add_key(file, "ada", {"rate": "1/s"})
    assert file.read_text().startswith("ada k1 rate=1/s\nada sha256:")


def test_key_file_over_8_mib_is_not_written(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text("ada k1\n" + "#" * ((8 << 20) - 20))
    before = written(file)
    with pytest.raises(UsageError, match="would be larger than the maximum of 8 MiB"):
        hash_keys(file)
    assert written(file) == before


def test_full_disk_leaves_the_key_file_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "keys").write_text("ada k1\n")
    monkeypatch.setattr(os, "fsync", _full)
    with pytest.raises(ConfigError, match="keys cannot be written: No space left on device"):
        hash_keys(file)
    assert file.read_text() == "ada k1\n" and [*tmp_path.iterdir()] == [file]


def _full(_: int) -> None:
    raise OSError(28, "No space left on device")


def test_key_file_of_another_user_is_not_replaced_if_chown_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "keys").write_text("ada k1\n")
    owner = os.stat_result((*file.stat()[:4], 12345, 12345, *file.stat()[6:]))
    monkeypatch.setattr(Path, "stat", lambda self, **_: owner if self == file else os.stat(self))
    monkeypatch.setattr(os, "fchown", _not_allowed)
    with pytest.raises(ConfigError, match="belongs to another user or group.*run this as that user, or as root"):
        hash_keys(file)
    assert file.read_text() == "ada k1\n"


def _not_allowed(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_concurrent_add_key_calls_lose_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: add_key(file, f"tenant{number}", {}), range(32)))
    keys = ApiKeys(files=[str(file)])
    assert {key and key.tenant for key in map(keys.find, made)} == {f"tenant{number}" for number in range(32)}
