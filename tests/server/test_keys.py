"""Keys of the HTTP API: what a line says, what is refused, and files that are read again."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from tests.server.composed import Answer, call, composed
from tests.server.served import until
from unfuse.cli.main import run
from unfuse.core.errors import ConfigError
from unfuse.core.request import Allowance
from unfuse.server.keys import Key, Keys, add


def written(folder: Path, *lines: str) -> Path:
    """A file of keys, replaced as a whole."""
    fresh, file = folder / "fresh", folder / "keys"
    fresh.write_text("\n".join(lines) + "\n")
    return fresh.replace(file)


def test_keys_come_from_the_command_line_and_from_files(tmp_path: Path) -> None:
    bob = "bob k3== admin=yes models=m,n/o rate=90/min concurrent=4"
    file = written(tmp_path, "# of the studio", "", "ada k1", "k2", bob)
    keys = Keys((str(file), "k4", "cy k5 read=yes rate=2/h"), ("k1", "k6"))
    assert keys.of("k1") == Key("ada", admin=True), "an admin's by another line"
    assert keys.of("k2") == keys.of("k4") == Key("default")
    assert keys.of("k3==") == Key("bob", True, False, frozenset({"m", "n/o"}), Allowance(4, 90, 60))
    assert keys.of("k5") == Key("cy", only_reads=True, allowance=Allowance(0, 2, 3600))
    assert keys.of("k6") == Key("admin", admin=True)
    for stranger in ("", "k", "k11", "K1", "ada", "bob k3==", "\udcff"):
        assert keys.of(stranger) is None


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["ada secret surprise"], "line 1: write NAME KEY"),
        (["ada secret rate=1/s rate=2/s"], "line 1: write NAME KEY"),
        (["ada secret colour=red"], "line 1: write NAME KEY"),
        (["", "secret admin=yes"], "line 2: what has limits needs a name"),
        (["ada secret admin=true"], "admin can be yes or no"),
        (["ada secret rate=5"], "rate is like 10/s"),
        (["ada secret rate=0/s"], "rate is like 10/s"),
        (["ada secret concurrent=-1"], "concurrent a number"),
        (["ada secret concurrent=9999999"], "up to 1000000"),
        (["ada secret", "bob secret"], "line 2: the key of bob is on another line too"),
        (["ada secret", "ada secret2 concurrent=2"], "line 2: ada has other limits on another line"),
        (["# nothing"], "there is no key in"),
    ],
)
def test_a_line_that_says_nothing_clear_is_refused_and_no_key_is_told(
    tmp_path: Path, lines: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        Keys((str(written(tmp_path, *lines)),))
    assert "secret" not in str(refused.value)


def test_what_is_given_is_no_file_s_name_and_is_not_told() -> None:
    assert Keys(("k" * 5000,)).of("k" * 5000) == Key("default", admin=True)
    with pytest.raises(ConfigError, match="NAME KEY") as refused:
        Keys(("one two three",))
    assert "two" not in str(refused.value)


def test_a_key_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys((str(tmp_path / "keys"),))


@pytest.mark.parametrize(
    ("given", "admins", "note"),
    [
        ((), (), ""),
        (("a",), (), "the one API key is an admin's"),
        (("a", "b"), (), "no key is an admin's: workers, pools and other tenants' requests are closed (--admin-key)"),
        (("a",), ("b",), ""),
        (("ada a admin=yes", "b"), (), ""),
    ],
)
def test_who_is_an_admin_is_said_at_the_start(given: tuple[str, ...], admins: tuple[str, ...], note: str) -> None:
    keys = Keys(given, admins)
    assert (keys.note, bool(keys)) == (note, bool(given or admins))


async def looked(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfuse.server.keys.LOOK_S", 0.0)
    for _ in range(3):
        await keys.look()


async def test_a_file_is_read_again_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys((str(written(tmp_path, "ada k1", "bob k2")),))
    written(tmp_path, "ada k1 concurrent=3", "cy k3")
    await looked(keys, monkeypatch)
    assert keys.of("k1") == Key("ada", allowance=Allowance(3))
    assert (keys.of("k2"), keys.of("k3")) == (None, Key("cy"))


@pytest.mark.parametrize("broken", ["ada k1 rate=often", "", "\0\ufffe \udcff"])
async def test_a_broken_edit_leaves_the_keys_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    keys = Keys((str(written(tmp_path, "ada k1")),))
    (tmp_path / "keys").write_bytes(broken.encode("utf-8", "surrogateescape") or b"\n")
    await looked(keys, monkeypatch)
    assert keys.of("k1") == Key("ada", admin=True)
    (tmp_path / "keys").unlink()
    await looked(keys, monkeypatch)
    assert keys.of("k1") and keys
    assert capsys.readouterr().out.count("keys stay as they were") == 2
    written(tmp_path, "ada k9")
    await looked(keys, monkeypatch)
    assert keys.of("k9") == Key("ada"), "and later ones count"
    assert keys.of("k1") is None


async def test_a_file_that_is_still_being_written_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfuse.server.keys.LOOK_S", 0.0)
    keys, file = Keys((str(written(tmp_path, "ada k1")),)), tmp_path / "keys"
    for text in ("ada k1\nbo", "ada k1\nbob k", "ada k1\nbob k2"):
        file.write_text(text)
        await keys.look()
        assert keys.of("k") is None
    await keys.look()
    assert keys.of("k2") == Key("bob")


async def test_removing_others_makes_nobody_an_admin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys((str(written(tmp_path, "ada k1", "bob k2")),))
    written(tmp_path, "ada k1")
    await looked(keys, monkeypatch)
    assert keys.of("k1") == Key("ada")


def typed(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run(arguments)
    assert ended.value.code == 0


def test_a_key_is_made_added_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "data" / "api-keys"
    added = ["keys", "add", "ada", "--rate", "60/min", "--concurrent", "2", "--models", "m", "--file", str(file)]
    typed(*added)
    said = capsys.readouterr()
    assert f"--api-key {file}" in said.err and said.out.strip() not in said.err
    typed("keys", "add", "root", "--admin", "--file", str(file))
    keys = Keys((str(file),))
    assert keys.of(said.out.strip()) == Key("ada", models=frozenset({"m"}), allowance=Allowance(2, 60, 60))
    assert keys.of(capsys.readouterr().out.strip()) == Key("root", admin=True)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["", "two words", "a=b", "x" * 65, "a\nb"])
def test_a_name_that_would_break_the_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="NAME is"):
        add(tmp_path / "keys", name, {})


def test_what_cannot_be_said_on_a_line_is_not_added(tmp_path: Path) -> None:
    file = written(tmp_path, "ada k1")
    for fields in ({"rate": "often"}, {"models": "a b"}):
        with pytest.raises(ConfigError):
            add(file, "bob", fields)
    assert file.read_text() == "ada k1\n" and sorted(tmp_path.iterdir()) == [file]


def answered(port: int, key: str, path: str = "/v1/requests") -> Answer:
    return call(port, path, f"Authorization: Bearer {key}")


def test_serve_reads_its_file_again_and_ends_the_streams_of_a_key_that_is_gone(tmp_path: Path) -> None:
    file = written(tmp_path, "ada k1", "bob k2")
    streamed: list[Answer] = []
    with composed(tmp_path / "data", api_key=[str(file)], models=["unfuse/shapes"]) as port:
        body = '{"prompt": "a red circle on white"}'
        headers = ("Authorization: Bearer k1", "Content-Type: application/json", "Prefer: respond-async")
        asked = call(port, "/v1/images/generations", *headers, method="POST", body=body)
        assert asked.status == 202
        events = f"/v1/requests/{asked.headers['location'].rpartition('/')[2]}/events"
        reader = threading.Thread(target=lambda: streamed.append(answered(port, "k1", events)))
        reader.start()
        assert answered(port, "k3").status == 401
        written(tmp_path, "bob k2", "cy k3")
        until(lambda: answered(port, "k3").status == 200)
        assert (answered(port, "k1").status, answered(port, "k2").status) == (401, 200)
        reader.join(30)
        assert streamed[0].status == 200 and b"event: queued" in streamed[0].body
        assert b'event: error\ndata: {"error"' in streamed[0].body and b"invalid_api_key" in streamed[0].body
