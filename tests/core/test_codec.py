"""Messages to bytes and back, whatever the bytes."""

from io import BytesIO

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from tests.core.structs import of
from tests.examples import examples
from unfuse.core import codec, messages
from unfuse.core.codec import HEADER_BYTES, frame, read_length, read_message, split_message
from unfuse.core.errors import ProtocolError
from unfuse.core.messages import RequestTasks, TaskCompleted, ToScheduler, ToWorker, Unregister
from unfuse.core.object_ref import ObjectRef, layout_tensors
from unfuse.core.plan import Params
from unfuse.core.request import RequestContext, RequestRecord, Timings
from unfuse.core.task import Claim, OutputDeltas, Task
from unfuse.testing.queue_samples import task_of

UNIONS = [("ToScheduler", ToScheduler), ("ToWorker", ToWorker)]
KINDS = [(kind, union) for _, union in UNIONS for kind in union.__args__]


def exactly(left: object, right: object) -> bool:
    """Equal in type as well: 1 is not 1.0, nor True."""
    return type(left) is type(right) and repr(left) == repr(right)


@pytest.mark.parametrize("kind, union", KINDS, ids=lambda kind: getattr(kind, "__name__", ""))
@settings(max_examples=examples(15), deadline=None)
@given(data=st.data())
def test_every_message_type_round_trips(kind: type, union: object, data: st.DataObject) -> None:
    message = data.draw(of(kind))
    assert exactly(codec.decode(codec.encode(message), union), message)


@settings(max_examples=examples(15), deadline=None)
@given(of(RequestContext))
def test_request_context_round_trips(context: RequestContext) -> None:
    assert exactly(codec.decode(codec.encode(RequestRecord(context)), RequestRecord), RequestRecord(context))


@settings(deadline=None)
@given(of(Params))
def test_parameters_round_trip_with_their_types(params: Params) -> None:
    task = task_of("r", "s", 1, "p", "k", "m", params)
    assert exactly(codec.decode(codec.encode(task), Task).params, params)


def test_object_ref_round_trips() -> None:
    metas, size = layout_tensors([("x", "bfloat16", (3, 5)), ("none", "none", ())])
    ref = ObjectRef("o", "w", "n", "r", "s", 1, 2, size, metas, (2**64 - 1,), bytes(16), 0.5)
    message = TaskCompleted(Claim("r", "s", 1, bytes(16)), ref, (), Timings())
    assert codec.decode(codec.encode(message), ToScheduler) == message


def test_first_byte_is_the_protocol_version() -> None:
    data = codec.encode(Unregister())
    assert data[0] == codec.VERSION


@pytest.mark.parametrize("version", sorted(set(range(256)) - {codec.VERSION}))
def test_other_protocol_version_is_rejected_with_advice(version: int) -> None:
    with pytest.raises(
        ProtocolError, match=f"version {version}, .*: install the same version of unfuse on all machines"
    ):
        codec.decode(bytes([version]) + codec.encode(Unregister())[1:], ToScheduler)


def test_unknown_field_of_a_newer_peer_is_ignored() -> None:
    body = msgspec.msgpack.encode(
        {"type": "RequestTasks", "slots": 1, "free_arena_bytes": None, "wait": 0.5, "mood": ["good"]}
    )
    assert codec.decode(bytes([codec.VERSION]) + body, ToScheduler) == RequestTasks(1, None, 0.5)


@pytest.mark.parametrize(
    "body",
    [
        {"type": "Nobody"},
        {"slots": 1, "free_arena_bytes": None, "wait": 0.0},
        {"type": "RequestTasks", "slots": 1},
        {"type": "RequestTasks", "slots": "1", "free_arena_bytes": None, "wait": 0.0},
        {"type": "RequestTasks", "slots": 1.5, "free_arena_bytes": None, "wait": 0.0},
        ["RequestTasks", 1, None, 0.0],
        None,
        "Unregister",
    ],
)
def test_malformed_message_raises_protocol_error(body: object) -> None:
    with pytest.raises(ProtocolError, match="message cannot be decoded"):
        codec.decode(bytes([codec.VERSION]) + msgspec.msgpack.encode(body), ToScheduler)


def test_message_of_the_other_direction_raises_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        codec.decode(codec.encode(Unregister()), ToWorker)


def test_empty_message_raises_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="0 bytes"):
        codec.decode(b"", ToScheduler)


def test_message_size_limit_is_equal_for_encode_and_decode() -> None:
    """The largest message that can be encoded can be decoded; one byte more is refused by either."""
    room = codec.MAX_BYTES - len(codec.encode(b"x" * 70_000)) + 70_000
    largest = codec.encode(b"x" * room)
    assert len(largest) == codec.MAX_BYTES
    assert codec.decode(largest, bytes) == b"x" * room
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        codec.encode(b"x" * (room + 1))
    with pytest.raises(ProtocolError, match="bytes"):
        codec.decode(largest + b"\0", bytes)


@pytest.mark.parametrize("body", ["caf\udce9", 1 << 64])
def test_unencodable_value_raises_protocol_error(body: object) -> None:
    with pytest.raises(ProtocolError, match="message cannot be encoded"):
        codec.encode(body)


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1x", b"\xdd\x00\x00\x00\x01", b"\x81"])
@pytest.mark.parametrize("kind", [ToScheduler, ToWorker, Params, RequestContext])
def test_deeply_nested_message_raises_protocol_error(opening: bytes, kind: object) -> None:
    """A million lists in lists end in an error, also where a newer peer's field would be skipped."""
    nested = opening * (1_000_000 // len(opening))
    skipped = b"\x82\xa4type\xa3Bye\xa1x" + nested
    for body in (nested, skipped):
        with pytest.raises(ProtocolError):
            codec.decode(bytes([codec.VERSION]) + body, kind)


@pytest.mark.parametrize("length", [b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"])
def test_declared_length_beyond_the_data_raises_protocol_error(length: bytes) -> None:
    """Four billion elements are claimed, none is there, and nothing is allocated for them."""
    for kind in (ToScheduler, Params, str, list[int], dict[str, int]):
        with pytest.raises(ProtocolError):
            codec.decode(bytes([codec.VERSION]) + length, kind)


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=200), st.booleans(), st.sampled_from([ToScheduler, ToWorker, RequestContext]))
def test_random_bytes_raise_only_protocol_error(noise: bytes, versioned: bool, kind: object) -> None:
    try:
        codec.decode((bytes([codec.VERSION]) if versioned else b"") + noise, kind)
    except ProtocolError as error:
        assert str(error)


@settings(max_examples=examples(80), deadline=None)
@given(of(TaskCompleted), st.data())
def test_corrupted_message_decodes_or_raises_protocol_error(message: TaskCompleted, data: st.DataObject) -> None:
    """Given a true message with a byte changed and its end cut, then it is a message or a ProtocolError."""
    damaged = bytearray(codec.encode(message))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    try:
        found = codec.decode(memoryview(damaged)[:cut], ToScheduler)
    except ProtocolError:
        return
    assert isinstance(found, ToScheduler)


def test_every_message_type_is_in_a_decodable_union() -> None:
    """A tagged struct that no union holds could be sent, and never read. Grown and Progress are parts of messages."""
    tagged = {
        found
        for found in vars(messages).values()
        if isinstance(found, type) and issubclass(found, msgspec.Struct) and found.__struct_config__.tag is not None
    }
    assert tagged - {OutputDeltas, messages.StepProgress} == {kind for kind, _ in KINDS}


MOST = 300


@given(st.lists(st.binary(max_size=MOST)), st.integers(1, 50))
def test_framed_messages_are_reassembled_from_any_fragments(sent: list[bytes], piece: int) -> None:
    stream, received, found = b"".join(map(frame, sent)), bytearray(), []
    for at in range(0, len(stream), piece):
        received += stream[at : at + piece]
        while (data := split_message(received, MOST)) is not None:
            found.append(data)
    assert (found, received) == (sent, bytearray())
    read = BytesIO(stream).read
    assert [read_message(read, MOST) for _ in sent] == sent


def test_oversized_frame_is_rejected_after_its_header() -> None:
    """Given a header alone, then it is refused at once, and nothing more is read."""
    asked: list[int] = []

    def read(count: int) -> bytes:
        asked.append(count)
        return (MOST + 1).to_bytes(HEADER_BYTES, "big")

    for refused in (
        lambda: read_message(read, MOST),
        lambda: split_message(bytearray(read(4)), MOST),
        lambda: read_length(read(4), MOST),
    ):
        with pytest.raises(ProtocolError, match=f"{MOST + 1} bytes.*limit of {MOST}"):
            refused()
    assert asked == [HEADER_BYTES] * 3
