"""LitServe with two workers and batches of four, by its docs' guide to batching; a batch waits 10 ms for others.

https://lightning.ai/docs/litserve/features/batching. `python -m bench.peers.with_litserve PORT WORKERS BATCH`
"""

from __future__ import annotations

import sys
from typing import Any

import litserve
from fastapi import Response

from bench.peers.pipeline import load, together


class Pictures(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.pipeline = load()

    def decode_request(self, request):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201 - it reads annotations
        return request

    def batch(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return inputs

    def predict(self, asked: Any) -> list[bytes]:
        made = together(self.pipeline, asked if isinstance(asked, list) else [asked])
        return made if isinstance(asked, list) else made[0]  # type: ignore[return-value]

    def unbatch(self, output: list[bytes]) -> list[bytes]:
        return output

    def encode_response(self, output: bytes) -> Response:
        return Response(output, media_type="image/png")


if __name__ == "__main__":
    port, workers, batch = map(int, sys.argv[1:])
    api = Pictures(max_batch_size=batch, batch_timeout=0.01, api_path="/picture")
    litserve.LitServer(api, accelerator="cpu", workers_per_device=workers, timeout=False).run(
        port=port, generate_client_file=False, log_level="error", num_api_servers=1
    )
