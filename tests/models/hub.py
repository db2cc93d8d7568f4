"""A hub on loopback: as much of its protocol as the hub library needs to list models and bring files of them."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]
PIECE = 1 << 16


@dataclass(frozen=True)
class Asked:
    """One request: `file` is the path in the model, nothing for what is no file; `storage` is where large ones are."""

    method: str
    path: str
    file: str
    ranged: bool
    storage: bool
    authorization: str | None


@dataclass
class Hub:
    """Models of commits of files. With a token, what is asked without it is not there."""

    url: str = ""
    token: str | None = None
    commits: dict[str, dict[str, Files]] = field(default_factory=dict)
    refs: dict[str, list[str]] = field(default_factory=dict)
    """Commits that a branch or tag is at: one after the other each time it is asked for, then the last."""
    asked: list[Asked] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    """After so many bytes each next answer with a large file breaks off."""
    pace_s: float = 0.0
    """How long each 64 KiB of a large file take."""
    listed: dict[str, int] = field(default_factory=dict)
    """Sizes that are listed, of files that have others."""
    stored: dict[str, bytes] = field(default_factory=dict)
    """What is sent in place of some large files."""
    gated: bool = False
    gone: bool = False
    """It answers nobody any more."""
    whole: bool = False
    """Whoever asks for a part of a file is sent all of it."""
    sent: int = 0
    """Bytes of large files that went out."""

    def push(self, name: str, files: Files, *refs: str) -> str:
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits.setdefault(name, {})[commit] = dict(files)
        for ref in refs or ("main",):
            self.refs[ref] = [commit]
        return commit

    def commit(self, name: str, revision: str) -> str | None:
        if revision in self.commits.get(name, {}):
            return revision
        there = self.refs.get(revision, [])
        return there.pop(0) if len(there) > 1 else next(iter(there), None)

    def brought(self) -> list[str]:
        """The files that were downloaded since this was last asked."""
        files = [one.file for one in self.asked if one.method == "GET" and one.file and not one.ranged]
        redirected = [one.file for one in self.asked if one.method == "GET" and one.storage]
        self.asked.clear()
        return sorted([file for file in files if not _large(file)] + [file for file in redirected if file in files])


def _large(file: str) -> bool:
    return file.endswith((".safetensors", ".bin", ".gguf"))


def _git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _listed(path: str, content: bytes, size: int | None = None) -> dict[str, Any]:
    size = len(content) if size is None else size
    entry: dict[str, Any] = {"type": "file", "path": path, "size": size, "oid": _git(content)}
    if _large(path):
        sha256 = hashlib.sha256(content).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(content)}\n".encode()
        entry["oid"] = _git(pointer)
        entry["lfs"] = {"oid": sha256, "size": size, "pointerSize": len(pointer)}
    return entry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        if self.hub.gone:
            self.close_connection = True
            return None
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if len(parts) < 4:  # what else a hub offers
            return self._refuse(404, "NotFound")
        storage = parts[0] == "storage"
        file = "/".join(parts[4:]) if storage or parts[2] == "resolve" else ""
        authorization = self.headers.get("Authorization")
        ranged = self.headers.get("Range")
        self.hub.asked.append(Asked(self.command, self.path, file, bool(ranged), storage, authorization))
        if storage:
            return self._send(200, self.hub.stored.get(file, self.hub.commits["/".join(parts[1:3])][parts[3]][file]))
        if self.hub.token is not None and authorization != f"Bearer {self.hub.token}":
            return self._refuse(401, "RepoNotFound")
        if parts[0] == "api":
            return self._describe("/".join(parts[2:4]), parts[4:])
        return self._resolve("/".join(parts[:2]), parts[3], file)

    def _describe(self, name: str, rest: list[str]) -> None:
        """`/api/models/OWNER/NAME[/revision/REVISION]` and `…/tree/REVISION`."""
        if name not in self.hub.commits:
            return self._refuse(404, "RepoNotFound")
        commit = self.hub.commit(name, rest[1] if rest else "main")
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        files = self.hub.commits[name][commit]
        answer: Any = {"id": name, "sha": commit, "siblings": [{"rfilename": path} for path in files]}
        if rest[:1] == ["tree"]:
            answer = [_listed(path, content, self.hub.listed.get(path)) for path, content in files.items()]
            answer.append({"type": "directory", "path": "transformer", "oid": "0" * 40, "size": 0})
        return self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, file: str) -> None:
        if self.hub.gated:
            return self._refuse(403, "GatedRepo")
        commit = self.hub.commit(name, revision)
        content = self.hub.commits[name][commit].get(file) if commit else None
        if content is None:
            return self._refuse(404, "EntryNotFound")
        entry = _listed(file, content)
        headers = {"X-Repo-Commit": str(commit), "ETag": f'"{entry["oid"]}"'}
        if "lfs" not in entry:
            return self._send(200, content, headers)
        port = self.hub.url.rpartition(":")[2]
        headers["Location"] = f"http://localhost:{port}/storage/{name}/{commit}/{file}"
        headers["X-Linked-Etag"] = f'"{entry["lfs"]["oid"]}"'
        headers["X-Linked-Size"] = str(len(content))
        return self._send(302, b"", headers)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code})

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        headers = dict(headers or {})
        ranged = self.headers.get("Range")
        storage = self.path.startswith("/storage/")
        if status == 200 and ranged and not (storage and self.hub.whole):
            first, last = ranged.removeprefix("bytes=").split("-")
            whole = len(content)
            content = content[int(first) : int(last) + 1 if last else None]
            status, headers["Content-Range"] = 206, f"bytes {first}-{int(first) + len(content) - 1}/{whole}"
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self._stream(content) if storage else self.wfile.write(content)

    def _stream(self, content: bytes) -> None:
        """A large file, which may break off, or take its time."""
        until = self.hub.cuts.pop(0) if self.hub.cuts else len(content)
        self.close_connection = self.close_connection or until < len(content)
        for place in range(0, min(until, len(content)), PIECE):
            if self.hub.gone:
                self.close_connection = True
                return
            piece = content[place : min(place + PIECE, until)]
            self.wfile.write(piece)
            self.hub.sent += len(piece)
            time.sleep(self.hub.pace_s)


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # closing waits for them: who asked has ended by then
    error: BaseException | None = None

    def handle_error(self, *_: object) -> None:
        if not isinstance(error := sys.exception(), ConnectionError):  # who asked has ended
            self.error = error


@contextmanager
def serve() -> Iterator[Hub]:
    hub = Hub()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    if server.error is not None:
        raise server.error
