"""Requests whose events are read until their server ends, as a client reads them."""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from tools.server import Server


class Followed:
    """The last denoising step that was told of each request; each is read in a thread of its own."""

    def __init__(self, server: Server, requests: Sequence[str]) -> None:
        self._server, self._steps = server, dict.fromkeys(requests, 0)
        self._threads = ThreadPoolExecutor(len(requests))
        self._following = [self._threads.submit(self._follow, request) for request in requests]

    def steps(self) -> dict[str, int]:
        """Wait until the server has ended, or all requests have; return the last step by request."""
        for one in self._following:
            one.result()
        self._threads.shutdown()
        return self._steps

    def _follow(self, request: str) -> None:
        with suppress(OSError, http.client.HTTPException):
            for event in self._server.events(request):
                if event["type"] == "progress" and event["stage"].startswith("denoise"):
                    self._steps[request] = event["step"]
