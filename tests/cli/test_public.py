"""What `import unfuse` offers."""

from __future__ import annotations

import socket

import pytest

import unfuse
from unfuse.cli.compose import listen
from unfuse.core import errors


def test_every_public_name_is_there() -> None:
    for name in unfuse.__all__:
        assert getattr(unfuse, name) is not None


def test_errors_are_the_ones_that_are_raised() -> None:
    assert unfuse.Overloaded is errors.Overloaded
    assert unfuse.ObjectLost is errors.ObjectLost


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = unfuse.nothing  # type: ignore[attr-defined,unused-ignore]


def test_a_model_that_is_not_there_is_refused_in_the_caller_s_process() -> None:
    with pytest.raises(errors.ConfigError, match="none/such/model"), unfuse.local("none/such/model"):
        pytest.fail("it started")


def test_answers_are_not_held_back_until_their_first_half_is_acknowledged() -> None:
    """asyncio turns Nagle's algorithm off for sockets that name their protocol: 40 ms a reply, otherwise."""
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
