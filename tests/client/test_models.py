"""Models that are added and removed by the Python clients, at a real gateway without workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.composed import composed
from unfuse.client import aconnect, connect
from unfuse.core.errors import InvalidParameter, PermanentError, UnknownModel
from unfuse.models import resolve_source

SHAPES = str(resolve_source("unfuse/shapes"))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with composed(tmp_path_factory.mktemp("served")) as port:
        yield f"http://127.0.0.1:{port}"


def test_model_is_added_under_a_name_read_and_removed(url: str) -> None:
    with connect(url) as client:
        added = client.add_model(SHAPES, "me/mine@1")
        assert (added["id"], added["state"], added["default"]) == ("me/mine@1", "loading", False)
        assert client.model("me/mine@1") == added
        with pytest.raises(PermanentError, match="served already: send another name"):
            client.add_model(SHAPES, "me/mine@1")
        with pytest.raises(InvalidParameter, match="and not a path") as refused:
            client.add_model(SHAPES, "/mine")
        assert refused.value.param == "name"
        with pytest.raises(InvalidParameter, match="there is no such folder"):
            client.add_model("/nowhere", "nowhere")
        assert client.remove_model("me/mine@1") == {"id": "me/mine@1", "object": "model", "deleted": True}
        with pytest.raises(UnknownModel):
            client.model("me/mine@1")
        with pytest.raises(UnknownModel):
            client.remove_model("me/mine@1")


async def test_async_client_adds_reads_and_removes_a_model(url: str, tmp_path: Path) -> None:
    (tmp_path / "flux").symlink_to(SHAPES)
    async with aconnect(url) as client:
        added = await client.add_model(str(tmp_path / "flux"))
        assert added["id"] == "flux" and await client.model("flux") == added
        assert (await client.remove_model("flux"))["deleted"]
        with pytest.raises(UnknownModel):
            await client.model("flux")
