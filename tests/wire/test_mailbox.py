"""A ZMQ socket in an event loop: nothing that came stays behind, whatever is sent meanwhile, and others have turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
import zmq
from hypothesis import given, settings, strategies as st
from structlog.testing import capture_logs

from unfuse.wire.mailbox import Mailbox

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
MANY = 300


@asynccontextmanager
async def pair(hear: Any) -> AsyncIterator[tuple[zmq.Socket[bytes], Mailbox]]:
    """A plain socket, and a mailbox at its other end."""
    with zmq.Context() as context:
        plain, inside = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        plain.bind("inproc://pair")
        inside.connect("inproc://pair")
        mailbox = Mailbox(inside, "hearing", hear)
        try:
            yield plain, mailbox
        finally:
            mailbox.close()
            plain.close(linger=0)


async def until_len(heard: list[Any], length: int) -> None:
    async with asyncio.timeout(20):
        while len(heard) < length:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("loop", LOOPS)
@settings(max_examples=20, deadline=None)
@given(bursts=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), max_size=10))
def test_messages_are_received_in_order_while_others_are_sent(loop: str, bursts: list[tuple[int, int]]) -> None:
    async def scenario() -> None:
        heard: list[bytes] = []
        async with pair(lambda frames: heard.extend(frames)) as (plain, mailbox):
            sent = 0
            for number, answers in bursts:
                for _ in range(number):
                    plain.send(str(sent := sent + 1).encode())
                for _ in range(answers):
                    mailbox.send([b"out"])
                await asyncio.sleep(0)
            await until_len(heard, sent)
            assert heard == [str(n + 1).encode() for n in range(sent)]
            assert [plain.recv(zmq.NOBLOCK) for _ in range(sum(n for _, n in bursts))] == [b"out"] * sum(
                n for _, n in bursts
            )

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(scenario())


async def test_sending_from_the_receive_callback_loses_no_message() -> None:
    async with pair(lambda frames: mailbox.send(frames)) as (plain, mailbox):
        for n in range(MANY):
            plain.send(str(n).encode())
        back: list[bytes] = []
        async with asyncio.timeout(20):
            while len(back) < MANY:
                await asyncio.sleep(0)
                while plain.poll(0):
                    back.append(plain.recv())
        assert back == [str(n).encode() for n in range(MANY)]


async def test_event_loop_runs_other_callbacks_between_two_messages() -> None:
    heard: list[list[bytes]] = []
    async with pair(heard.append) as (plain, _):
        for _ in range(MANY):
            plain.send(b"")
        turns = 0
        while len(heard) < MANY:
            before = len(heard)
            await asyncio.sleep(0)
            turns += 1
            assert len(heard) <= before + 1
        assert turns >= MANY


async def test_callback_error_is_logged_and_the_next_message_is_received() -> None:
    heard = list[list[bytes]]()

    def hear(frames: list[bytes]) -> None:
        heard.append(frames)
        if frames == [b"bad"]:
            raise ValueError("bad")

    async with pair(hear) as (plain, _):
        for frame in (b"bad", b"good"):
            plain.send(frame)
        with capture_logs() as logs:
            await until_len(heard, 2)
    assert [line["doing"] for line in logs] == ["hearing"]


async def test_closed_mailbox_receives_nothing_and_raises_on_send() -> None:
    heard: list[list[bytes]] = []
    async with pair(heard.append) as (plain, mailbox):
        plain.send(b"late")
        mailbox.close()
        mailbox.close()
        await asyncio.sleep(0.01)
        assert heard == []
        with pytest.raises(zmq.ZMQError):
            mailbox.send([b"x"])
