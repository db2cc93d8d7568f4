"""A target of webhooks, which keeps what it was told and answers as it is said to."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from standardwebhooks import Webhook

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
Answer = Callable[[socket.socket], None]


def saying(data: bytes) -> Answer:
    """Answers with these bytes."""
    return lambda connection: connection.sendall(data)


class Receiver:
    """Listens on a port of its own. `answers` are those of the next calls; then each gets 200."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.calls: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[Answer] = []
        self._listener = socket.create_server((host, 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://{host}:{self.port}/hook?from=unfuse"
        self._held: list[socket.socket] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def hang(self, connection: socket.socket) -> None:
        """An answer that never comes."""
        self._held.append(connection)

    def close(self) -> None:
        self._listener.close()
        for connection in self._held:
            connection.close()

    def verified(self, secret: str) -> list[dict[str, Any]]:
        """What it was told, once the library of Standard Webhooks has found every signature right."""
        return [Webhook(secret).verify(body, headers) for headers, body in list(self.calls)]

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError):
            data = b""
            while b"\r\n\r\n" not in data:
                data += connection.recv(65536)
            head, _, body = data.partition(b"\r\n\r\n")
            lines = head.decode().split("\r\n")[1:]
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            while len(body) < int(headers["content-length"]):
                body += connection.recv(65536)
            answer = self.answers.pop(0) if self.answers else saying(OK)
            self.calls.append((headers, body))
            answer(connection)
            if connection not in self._held:
                connection.close()
