"""Videos as streams: what is written while frames come is what the finished file becomes, byte for byte."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path
from struct import pack, unpack

import av
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from tests.examples import examples
from unfuse.stages.fragments import KEY, Fragments, configuration, streamed, units, with_lengths
from unfuse.stages.media import VideoWriter


def noise(frames: int, width: int = 32, height: int = 16, seed: int = 0) -> NDArray[np.uint8]:
    """Frames that have next to nothing in common."""
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), np.uint8)


def recorded(pieces: list[NDArray[np.uint8]], fps: float = 8) -> tuple[list[bytes], bytes]:
    """What each piece added to the stream, and the finished file."""
    video = VideoWriter(fps)
    parts = [video.add(piece) for piece in pieces]
    (media,) = video.finish()
    return parts, media.data


def played(data: bytes) -> tuple[NDArray[np.uint8], list[float], Fraction | None]:
    """The frames, when each is shown, and how many there are a second."""
    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(video=0))
        rate = container.streams.video[0].average_rate
        return np.stack([one.to_ndarray(format="rgb24") for one in frames]), [one.time or 0.0 for one in frames], rate


def again(folder: Path, file: bytes, fps: float = 8) -> list[bytes]:
    """The stream of a finished file."""
    path = folder / "finished.mp4"
    path.write_bytes(file)
    return list(streamed(path, fps))


@given(data=st.data(), fps=st.sampled_from([1, 8, 12.5, 16, 24, 29.97, 60]), seed=st.integers(0, 99))
@settings(max_examples=examples(20), deadline=None)
def test_fragmented_mp4_is_independent_of_frame_grouping(
    data: st.DataObject, fps: float, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    side = data.draw(st.sampled_from([16, 18, 34]))
    frames = noise(sum(sizes), side, 48, seed)
    pieces = np.split(frames, np.cumsum(sizes)[:-1])

    parts, file = recorded(pieces, fps)
    at_once, same = recorded([frames], fps)

    assert b"".join(parts) == b"".join(at_once) == b"".join(again(tmp_path_factory.mktemp("f"), file, fps))
    assert file == same
    (pictures, times, rate), (shown, when, found) = played(b"".join(parts)), played(file)
    assert np.array_equal(pictures, shown)
    assert (times, rate) == (when, found)
    assert len(times) == sum(sizes)


def test_each_video_fragment_is_playable_with_the_preceding_ones() -> None:
    frames = noise(9)
    parts, file = recorded([frames[:1], frames[1:5], frames[5:]])
    whole = played(file)[0]

    for count, end in ((1, 1), (2, 5), (3, 9)):
        assert np.array_equal(played(b"".join(parts[:count]))[0], whole[:end])


def boxes(data: bytes) -> list[tuple[bytes, bytes]]:
    """The boxes of one level, each a kind and its content."""
    found = []
    while data:
        (size,) = unpack(">I", data[:4])
        assert 8 <= size <= len(data)
        found.append((data[4:8], data[8:size]))
        data = data[size:]
    return found


def test_fragmented_mp4_has_a_header_and_one_fragment_per_frame() -> None:
    parts, file = recorded([noise(3)])

    assert [kind for kind, _ in boxes(parts[0])] == [b"ftyp", b"moov", *[b"moof", b"mdat"] * 3]
    for number, (kind, content) in enumerate(boxes(parts[0])[2::2], 1):
        (_, header), (_, track) = boxes(content)
        assert (kind, unpack(">I", header[4:])) == (b"moof", (number,))
        assert [name for name, _ in boxes(track)] == [b"tfhd", b"tfdt", b"trun"]
    assert dict(boxes(file)).keys() >= {b"ftyp", b"moov", b"mdat"}
    assert b"moof" not in dict(boxes(file))


def test_fragment_data_offset_points_to_the_frame() -> None:
    fragment = Fragments(16, 16, Fraction(8), b"").fragment(frame := b"\0\0\0\1\x65\0\0\0\2\x41\0")
    (_, moof), (_, mdat) = boxes(fragment)
    run = dict(boxes(dict(boxes(moof))[b"traf"]))[b"trun"]
    _, count, offset, duration, size, flags = unpack(">6I", run)
    assert (count, duration, size, mdat) == (1, 1, len(frame), frame)
    assert fragment[offset:] == frame
    assert flags == KEY


@settings(deadline=None)
@given(st.lists(st.binary(min_size=1).map(lambda raw: raw.replace(b"\0", b"\1")), min_size=1), st.data())
def test_nal_units_split_at_three_and_four_byte_start_codes(made: list[bytes], data: st.DataObject) -> None:
    codes = st.sampled_from([b"\0\0\1", b"\0\0\0\1"])
    encoded = b"".join(data.draw(codes) + unit for unit in made)

    assert units(encoded) == made
    assert with_lengths(encoded) == b"".join(pack(">I", len(unit)) + unit for unit in made)


def test_avc_configuration_equals_that_of_the_finished_mp4(tmp_path: Path) -> None:
    video = VideoWriter(8)
    video.add(noise(1))
    parameters = video._stream.codec_context.extradata
    (tmp_path / "video.mp4").write_bytes(video.finish()[0].data)

    with av.open(str(tmp_path / "video.mp4")) as container:
        assert configuration(parameters) == container.streams.video[0].codec_context.extradata


@pytest.mark.parametrize("profile", [66, 77])
def test_avc_configuration_of_simple_profiles_ends_with_parameter_sets(profile: int) -> None:
    sequence, picture = bytes([0x67, profile, 0, 30, 9]), b"\x68\xaa"
    found = configuration(b"\0\0\0\1" + sequence + b"\0\0\1" + picture)
    assert found == bytes([1, profile, 0, 30, 255, 225, 0, 5]) + sequence + b"\1\0\2" + picture
