"""Keys of the HTTP API: which are accepted, what a line says, what is refused, and files that are read again."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from pathlib import Path

import pytest

from tests.server.composed import Answer, call, composed
from tests.server.served import until
from unfuse.core.errors import ConfigError, UsageError
from unfuse.core.request import TenantLimits
from unfuse.edge.keys import ApiKey, ApiKeys

GIVEN = "given-key-of-tests"


def written(folder: Path, *lines: str) -> Path:
    """A file of keys, replaced as a whole."""
    fresh, file = folder / "fresh", folder / "keys"
    fresh.write_text("\n".join(lines) + "\n")
    return fresh.replace(file)


def in_file(folder: Path, *lines: str) -> ApiKeys:
    return ApiKeys(files=[str(written(folder, *lines))])


def line(name: str, key: str, *fields: str) -> str:
    return " ".join([name, "sha256:" + hashlib.sha256(key.encode()).hexdigest(), *fields])


def test_keys_are_read_from_flags_and_key_files(tmp_path: Path) -> None:
    bob = line("bob", "k3==", "admin=yes", "models=m,n/o", "rate=90/min", "concurrent=4")
    file = written(tmp_path, "# of the studio", "", "ada k1", "k2", bob, "cy k5 read=yes rate=2/h")
    keys = ApiKeys([GIVEN], [str(file)])
    assert keys.find("k1") == ApiKey("ada")
    assert keys.find("k2") == keys.find(GIVEN) == ApiKey("default")
    assert keys.find("k3==") == ApiKey("bob", True, False, frozenset({"m", "n/o"}), TenantLimits(4, 90, 60))
    assert keys.find("k5") == ApiKey("cy", read_only=True, limits=TenantLimits(0, 2, 3600))
    for stranger in ("", "k", "k11", "K1", "ada", "bob k3==", bob.split()[1], bob.split()[1].removeprefix("sha256:")):
        assert keys.find(stranger) is None
    assert keys.find("\udcff") is None


def test_key_file_entry_overrides_the_same_key_given_as_a_flag(tmp_path: Path) -> None:
    """As when UNFUSE_API_KEY, which client verbs send, is set where the server starts."""
    keys = ApiKeys([GIVEN, GIVEN], [str(written(tmp_path, line("ada", GIVEN, "rate=1/h"), "bob k2"))])
    assert keys.find(GIVEN) == ApiKey("ada", limits=TenantLimits(0, 1, 3600))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["ada secret surprise"], "line 1: write NAME sha256:HEX"),
        (["ada secret rate=1/s rate=2/s"], "line 1: write NAME sha256:HEX"),
        (["ada secret colour=red"], "line 1: write NAME sha256:HEX"),
        (["", "secret admin=yes"], "line 2: a key with limits needs a name"),
        (["ada secret admin=true"], "admin must be yes or no"),
        (["ada secret rate=5"], "rate must be like 10/s"),
        (["ada secret rate=0/s"], "rate must be like 10/s"),
        (["ada secret concurrent=-1"], "concurrent a number"),
        (["ada secret concurrent=9999999"], "up to 1000000"),
        (["ada secret", "bob secret"], "line 2: the key of bob is also on another line .*line 1"),
        (["ada secret", line("bob", "secret")], "line 2: the key of bob is also on another line"),
        (["ada secret", "ada secret2 concurrent=2"], "line 2: ada has other limits on another line .*line 1"),
        (["ada sha256:secret"], "line 1: sha256: needs 64 hex digits"),
        ([line("ada", "secret")[:-1]], "line 1: sha256: needs 64 hex digits"),
        (["a/da secret"], "line 1: a name must have 1 to 64 letters"),
        (["x" * 65 + " secret"], "line 1: a name must have 1 to 64 letters"),
        (["ada sécret"], "line 1: a key may have printable ASCII"),
        (["ada secret\0"], "line 1: a key may have printable ASCII"),
        (["# nothing"], "there is no key in .*unfuse keys add NAME"),
    ],
)
def test_invalid_key_file_lines_are_rejected_without_leaking_keys(tmp_path: Path, lines: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        in_file(tmp_path, *lines)
    assert "secret" not in str(refused.value)


def test_key_file_accepts_bom_crlf_and_repeated_lines(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbf# by hand\r\nada k1\r\nada k1\r\nada k2\r\n")
    keys = ApiKeys(files=[str(tmp_path / "keys")])
    assert keys.find("k1") == keys.find("k2") == ApiKey("ada")


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("fifteen-letters", "has 15 characters, but a key needs at least 16: `unfuse keys add NAME`"),
        ("keys.txt", "looks like a file path: pass a file of keys by --api-keys"),
        ("/etc/unfuse/keys.txt", "looks like a file path"),
        ("./secrets/of/a-studio", "looks like a file path"),
        ("../secrets/of/a-studio", "looks like a file path"),
        ("~/secrets-of-a-studio", "looks like a file path"),
        ("", "one key of printable ASCII"),
        ("anna 0123456789abcdef", "one key of printable ASCII"),
        ("schlüssel-des-studios", "printable ASCII"),
        (line("", "k").strip(), "not its hash"),
    ],
)
def test_malformed_api_key_flag_raises_usage_error(key: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        ApiKeys([GIVEN, key])
    assert not key.strip() or key not in str(refused.value)


def test_file_path_given_as_api_key_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "ada k1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-folder-of-secrets").mkdir()
    (tmp_path / "a-file-without-ending").write_text("ada k1\n")
    for path in (tmp_path / "keys", tmp_path / "missing", "a-folder-of-secrets/api-keys", "a-file-without-ending"):
        with pytest.raises(UsageError, match="looks like a file path"):
            ApiKeys([str(path)])


@pytest.mark.parametrize("key", ["k" * 16, "k" * 5000, "a+b/c+d/e+f/g+h/=", "sk-proj_0123.456789-abcdefghij"])
def test_valid_api_key_flags_are_accepted_and_a_sole_key_is_admin(key: str) -> None:
    assert ApiKeys([key]).find(key) == ApiKeys([key, key]).find(key) == ApiKey("default", admin=True)
    assert ApiKeys([f"{key}\n", GIVEN]).find(key) == ApiKey("default"), "as a secret that was mounted ends"


def test_missing_key_file_error_names_the_create_command(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=f"there is no key file {tmp_path}/keys: create it with `unfuse keys add NAME --file "
    ):
        ApiKeys(files=[str(tmp_path / "keys")])


@pytest.mark.parametrize("kind", ["bytes", "folder", "pipe", "huge", "closed", "zeros"])
def test_unreadable_key_file_raises_usage_error(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    match kind:
        case "bytes":
            file.write_bytes(b"ada k1\n\xff\xfe")
        case "folder":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)
        case "huge":
            with file.open("wb") as opened:
                opened.truncate(1 << 40)
        case "closed":
            file.write_text("ada k1\n")
            monkeypatch.setattr("unfuse.edge.keys.os.open", _denied)
        case "zeros":
            file.write_bytes(bytes(4096))
    with pytest.raises(UsageError, match=rf"{file}.*(cannot be read|is larger than 8 MiB|line 1: )"):
        ApiKeys(files=[str(file)])


def _denied(*_: object) -> int:
    raise PermissionError(13, "Permission denied")


def test_key_file_with_50000_keys_is_read(tmp_path: Path) -> None:
    keys = in_file(tmp_path, *(f"tenant{number} sha256:{number:064x} rate=1/s" for number in range(50_000)))
    assert len(keys.all()) == 50_000


@pytest.mark.parametrize(
    ("given", "lines", "note"),
    [
        ([], [], ""),
        ([GIVEN], [], "the only API key has admin rights"),
        ([GIVEN, GIVEN * 2], [], "no API key has admin rights, .* write admin=yes on a line of --api-keys FILE"),
        ([], ["ada a"], "no API key has admin rights, .* write admin=yes on a line of .*/keys"),
        ([GIVEN], ["ada a"], "no API key has admin rights"),
        ([], ["ada a admin=yes", "b"], ""),
    ],
)
def test_admin_note_reports_a_sole_or_missing_admin_key(
    tmp_path: Path, given: list[str], lines: list[str], note: str
) -> None:
    keys = ApiKeys(given, [str(written(tmp_path, *lines))] if lines else [])
    assert bool(keys) == bool(given or lines)
    assert re.match(note, keys.admin_note) if note else not keys.admin_note


def test_plain_keys_in_key_files_warn_with_the_hash_command(tmp_path: Path) -> None:
    (first := tmp_path / "first").write_text("ada k1\nbob k2\n")
    (second := tmp_path / "second").write_text("cy k3\n")
    (third := tmp_path / "third").write_text(line("dan", "k4") + "\n")
    warning = ApiKeys(files=[str(first), str(second), str(third)]).warning
    assert f"`unfuse keys hash {first}`, `unfuse keys hash {second}`" in warning
    assert "k1" not in warning and str(third) not in warning
    assert ApiKeys([GIVEN], [str(third)]).warning == ApiKeys([GIVEN]).warning == ApiKeys().warning == ""


async def looked(keys: ApiKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfuse.edge.keys.CHECK_INTERVAL_S", 0.0)
    for _ in range(3):
        await keys.reload_if_changed()


async def test_changed_key_file_is_reloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = in_file(tmp_path, "ada k1", "bob k2")
    written(tmp_path, "ada k1 concurrent=3", "cy k3")
    await looked(keys, monkeypatch)
    assert keys.find("k1") == ApiKey("ada", limits=TenantLimits(3))
    assert (keys.find("k2"), keys.find("k3")) == (None, ApiKey("cy"))


@pytest.mark.parametrize("broken", ["ada k1 rate=often", "", "\0\ufffe \udcff"])
async def test_invalid_key_file_edit_leaves_the_loaded_keys_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    keys = in_file(tmp_path, "ada k1")
    (tmp_path / "keys").write_bytes(broken.encode("utf-8", "surrogateescape") or b"\n")
    await looked(keys, monkeypatch)
    await looked(keys, monkeypatch)
    assert keys.find("k1") == ApiKey("ada")
    (tmp_path / "keys").unlink()
    await looked(keys, monkeypatch)
    assert keys.find("k1") and keys
    assert capsys.readouterr().out.count("API keys are unchanged") == 2, "each reason once"
    written(tmp_path, "ada k9")
    await looked(keys, monkeypatch)
    assert keys.find("k9") == ApiKey("ada"), "and later ones count"
    assert keys.find("k1") is None


async def test_key_file_is_reloaded_after_a_transient_read_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given an edit that comes while files cannot be opened, then it counts as soon as they can, unchanged."""
    keys = in_file(tmp_path, "ada k1")
    written(tmp_path, "ada k2")
    with monkeypatch.context() as failing:
        failing.setattr("unfuse.edge.keys.os.open", _no_file)
        await looked(keys, failing)
        assert keys.find("k1") and not keys.find("k2")
    await looked(keys, monkeypatch)
    assert keys.find("k2") and not keys.find("k1")


def _no_file(*_: object) -> int:
    raise OSError(24, "Too many open files")


async def test_key_file_is_not_reloaded_while_it_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unfuse.edge.keys.CHECK_INTERVAL_S", 0.0)
    keys, file = in_file(tmp_path, "ada k1"), tmp_path / "keys"
    for text in ("ada k1\nbo", "ada k1\nbob k", "ada k1\nbob k2"):
        file.write_text(text)
        await keys.reload_if_changed()
        assert keys.find("k") is None
    await keys.reload_if_changed()
    assert keys.find("k2") == ApiKey("bob")


async def test_last_remaining_key_in_a_file_does_not_become_admin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = in_file(tmp_path, "ada k1", "bob k2")
    written(tmp_path, "ada k1")
    await looked(keys, monkeypatch)
    assert keys.find("k1") == ApiKey("ada")


def answered(port: int, key: str, path: str = "/v1/requests") -> Answer:
    return call(port, path, f"Authorization: Bearer {key}")


def test_reload_ends_the_event_streams_of_a_removed_key(tmp_path: Path) -> None:
    """A key that becomes its hash stays: its stream goes on."""
    file = written(tmp_path, "ada k1", "bob k2")
    streamed: dict[str, Answer] = {}
    with composed(tmp_path / "data", api_keys=[str(file)], models=["unfuse/shapes"]) as port:
        body = '{"prompt": "a red circle on white"}'
        readers, paths = [], {}
        for key in ("k1", "k2"):
            headers = (f"Authorization: Bearer {key}", "Content-Type: application/json", "Prefer: respond-async")
            asked = call(port, "/v1/images/generations", *headers, method="POST", body=body)
            assert asked.status == 202
            paths[key] = f"/v1/requests/{asked.headers['location'].rpartition('/')[2]}"
            read = lambda key=key: streamed.update({key: answered(port, key, f"{paths[key]}/events")})  # noqa: E731
            readers.append(threading.Thread(target=read))
            readers[-1].start()
        assert answered(port, "k3").status == 401
        written(tmp_path, line("bob", "k2"), "cy k3")
        until(lambda: answered(port, "k3").status == 200)
        assert (answered(port, "k1").status, answered(port, "k2").status) == (401, 200)
        readers[0].join(30)
        assert streamed["k1"].status == 200 and b"event: queued" in streamed["k1"].body
        assert b'event: error\ndata: {"error"' in streamed["k1"].body and b"invalid_api_key" in streamed["k1"].body
        assert "k2" not in streamed, "its key is the same"
        cancel = call(port, f"{paths['k2']}/cancel", "Authorization: Bearer k2", method="POST")
        assert cancel.status == 200
        readers[1].join(30)
        assert b"event: cancelled" in streamed["k2"].body and b"event: error" not in streamed["k2"].body


def test_non_loopback_bind_with_a_missing_key_file_fails_to_start(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="there is no key file"),
        composed(tmp_path, host="0.0.0.0", api_keys=[str(tmp_path / "keys.txt")]),
    ):
        pass
