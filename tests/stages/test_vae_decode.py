"""VAE decoding, whatever the VAE: pixels as diffusers rounds them, and a file at the end."""

import io
import math
import weakref
from collections.abc import Iterator

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.stages import vae_decode
from unfuse.stages.base import StageInput, next_states
from unfuse.stages.device_copies import HostCopy
from unfuse.stages.vae_decode import CausalDecoder, Pixels, VaeDecode, VaeDecodeState

PARAMS: Params = {"output_format": "png"}


class Same:
    """A decoder whose pixels are its latents."""

    vae = None
    latents = (1, 3, None, None, None)

    def __init__(self) -> None:
        self.weight, self.calls = torch.ones(1, requires_grad=True), list[int]()

    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        return latents

    def decode(self, grid: Tensor) -> Tensor:
        self.calls.append(len(grid))
        return self.weight * grid


def test_each_frame_becomes_a_lossless_png() -> None:
    video = torch.rand(1, 3, 3, 8, 16) * 2 - 1
    stage = VaeDecode(Same())
    task = StageInput(PARAMS, {"latents": video})
    stage.verify(task)

    (output,) = stage.run([task])

    pictures = [np.asarray(Image.open(io.BytesIO(media.data))) for media in output.media]
    assert output.tensors == {}
    assert {media.content_type for media in output.media} == {"image/png"}
    assert np.array_equal(np.stack(pictures), Pixels(video[0]).read())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixels_are_rounded_as_diffusers_rounds_them(dtype: torch.dtype) -> None:
    """Among the values are all exact halves, which go to the even neighbour, and some outside −1 to 1."""
    from diffusers.video_processor import VideoProcessor

    halves = (torch.arange(256) + 0.5) / 255 * 2 - 1
    values = torch.cat([halves, torch.linspace(-1.2, 1.2, 3 * 2 * 16 * 16 - 256)])
    video = values.to(dtype).reshape(1, 3, 2, 16, 16)

    expected = VideoProcessor().postprocess_video(video, output_type="pil")[0]

    assert np.array_equal(Pixels(video[0]).read(), np.stack([np.asarray(frame) for frame in expected]))


def test_non_finite_pixels_raise_permanent_error() -> None:
    video = torch.zeros(1, 3, 1, 8, 8)
    video[0, 1, 0, 2, 3] = math.nan

    with pytest.raises(PermanentError, match="pixels that are not finite"):
        VaeDecode(Same()).run([StageInput(PARAMS, {"latents": video})])


@pytest.mark.parametrize(
    ("params", "tensors", "sentence"),
    [
        (PARAMS, {}, "input latents is missing"),
        (PARAMS, {"latents": None}, "input latents is missing"),
        (PARAMS, {"latents": torch.zeros(1, 4, 1, 8, 8)}, "input latents must be floating point of 1×3×any×any×any"),
        ({}, {"latents": torch.zeros(1, 3, 1, 8, 8)}, "parameter output_format must be of type str"),
        (
            {"output_format": "gif"},
            {"latents": torch.zeros(1, 3, 1, 8, 8)},
            "output_format must be png, jpeg, webp, mp4",
        ),
    ],
)
def test_verify_rejects_missing_or_invalid_parameters_and_latents(
    params: Params, tensors: dict[str, Tensor | None], sentence: str
) -> None:
    with pytest.raises(PermanentError, match=sentence):
        VaeDecode(Same()).verify(StageInput(params, tensors))


def test_batch_of_equal_size_is_decoded_in_one_call_with_separate_files() -> None:
    videos = [torch.rand(1, 3, 1, 8, 16) * 2 - 1 for _ in range(3)]
    forms = ("png", "webp", "png")
    tasks = [StageInput({"output_format": f}, {"latents": v}) for f, v in zip(forms, videos, strict=True)]

    decoder = Same()
    stage = VaeDecode(decoder)
    states = [stage.start(task) for task in tasks]
    assert next_states(stage, states) == states
    outputs = [stage.finish(state) for state in states]

    assert decoder.calls == [3]
    assert [output.media[0].content_type for output in outputs] == ["image/png", "image/webp", "image/png"]
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(outputs[2].media[0].data))), Pixels(videos[2][0]).read()[0])


class Frames(Same):
    """A decoder that makes a piece for each frame of its latents; `held` are the pieces that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.held: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most = 0

    def fragment_count(self, grid: Tensor) -> int:
        return grid.shape[2]

    def decode_fragments(self, grid: Tensor) -> Iterator[Tensor]:
        for number in range(grid.shape[2]):
            pixels = self.decode(grid[:, :, number : number + 1])
            self.held.add(pixels)
            self.most = max(self.most, len(self.held))
            yield pixels
            del pixels


def begun(stage: VaeDecode, task: StageInput) -> VaeDecodeState:
    stage.verify(task)
    state = stage.start(task)
    assert stage.progress(state) == (0, task.tensors["latents"].shape[2])  # type: ignore[union-attr]
    return state


@pytest.mark.parametrize("form", ["png", "mp4"])
def test_stepwise_decode_writes_the_same_files_as_whole_decode(form: str) -> None:
    params: Params = {"output_format": form, "fps": 8}
    tasks = [StageInput(params, {"latents": torch.rand(1, 3, frames, 16, 32) * 2 - 1}) for frames in (1, 4)]

    assert VaeDecode(Frames()).run(tasks) == [VaeDecode(Same()).run([task])[0] for task in tasks]


def test_stepwise_decode_allocates_pixels_of_one_step_at_a_time() -> None:
    decoder = Frames()
    VaeDecode(decoder).run([StageInput(PARAMS, {"latents": torch.rand(1, 3, 6, 8, 8)})])
    assert decoder.most == 1


def test_interleaved_decodes_stream_separate_fragments_and_files() -> None:
    stage, params = VaeDecode(Frames()), {"output_format": "mp4", "fps": 8}
    tasks = [StageInput({**params}, {"latents": torch.rand(1, 3, 3, 16, 32) * 2 - 1}) for _ in range(2)]
    states, parts = [begun(stage, task) for task in tasks], ([b""], [b""])

    for number in range(1, 4):
        assert next_states(stage, states) == states
        for state, own in zip(states, parts, strict=True):
            assert stage.progress(state) == (number, 3)
            own.append(stage.video_fragment(state))

    files = [stage.finish(state).media[0].data for state in states]
    assert files == [stage.run([task])[0].media[0].data for task in tasks]
    assert files[0] != files[1]
    for file, own in zip(files, parts, strict=True):
        assert all(own[1:])
        with av.open(io.BytesIO(file)) as whole, av.open(io.BytesIO(b"".join(own))) as live:
            for shown, streamed in zip(whole.decode(video=0), live.decode(video=0), strict=True):
                assert np.array_equal(shown.to_ndarray(), streamed.to_ndarray())


def test_request_failing_mid_decode_does_not_fail_its_batch() -> None:
    stage = VaeDecode(Frames())
    good, bad = (torch.zeros(1, 3, 2, 8, 8) for _ in range(2))
    bad[0, 0, 1, 0, 0] = math.nan
    states = [begun(stage, StageInput(PARAMS, {"latents": latents})) for latents in (good, bad)]

    for _ in range(2):
        assert next_states(stage, states) == states
    assert stage.finish(states[0]).media
    with pytest.raises(PermanentError, match="the decoder produced pixels that are not finite"):
        stage.finish(states[1])


def test_single_images_of_a_causal_decoder_are_batched() -> None:
    decoder = Frames()
    stage = VaeDecode(decoder)
    states = [begun(stage, StageInput(PARAMS, {"latents": torch.rand(1, 3, 1, 8, 8)})) for _ in range(3)]

    assert next_states(stage, states) == states
    assert decoder.calls == [3]
    assert [stage.progress(state) for state in states] == [(1, 1)] * 3


@pytest.mark.parametrize("decoder", [Same, Frames])
def test_non_finite_pixels_fail_only_their_request_in_a_batch(decoder: type[Same]) -> None:
    stage = VaeDecode(decoder())
    good, bad = torch.zeros(1, 3, 1, 8, 8), torch.full((1, 3, 1, 8, 8), math.nan)
    states = [stage.start(StageInput(PARAMS, {"latents": latents})) for latents in (bad, good)]

    assert next_states(stage, states) == states
    with pytest.raises(PermanentError, match="the decoder produced pixels that are not finite"):
        stage.finish(states[0])
    (picture,) = stage.finish(states[1]).media
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(picture.data))), Pixels(good[0]).read()[0])


def test_pixels_are_converted_to_bytes_before_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only uint8 frames and a flag leave the device, by copies for which the step does not wait."""
    copied: list[Tensor] = []

    class Copy(HostCopy):
        def __init__(self, *tensors: Tensor) -> None:
            copied.extend(tensors)
            super().__init__(*tensors)

    monkeypatch.setattr(vae_decode, "HostCopy", Copy)
    stage = VaeDecode(Same())
    state = stage.start(StageInput(PARAMS, {"latents": torch.rand(1, 3, 2, 8, 16)}))
    assert stage.step([state]) == [state]
    assert {(tensor.dtype, tensor.numel(), tensor.is_contiguous()) for tensor in copied} == {
        (torch.uint8, 2 * 8 * 16 * 3, True),
        (torch.bool, 1, True),
    }


def test_rank_that_encodes_no_files_keeps_no_frames() -> None:
    stage = VaeDecode(Frames())
    state = stage.start(StageInput(PARAMS, {"latents": torch.rand(1, 3, 2, 8, 8)}))
    assert stage.step([state]) == [state]
    assert state.unencoded
    stage.discard_frames(state)
    assert not state.unencoded


@pytest.mark.parametrize("decoder", [Same, Frames])
def test_step_that_runs_out_of_memory_loses_no_frame_when_it_is_repeated(
    decoder: type[Same], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its pixels were decoded; a second attempt has them all."""
    left = [MemoryError("full")]

    class Full(Pixels):
        def __init__(self, video: Tensor) -> None:
            if left:
                raise left.pop()
            super().__init__(video)

    task = StageInput(PARAMS, {"latents": torch.rand(1, 3, 3, 8, 8) * 2 - 1})
    (expected,) = VaeDecode(decoder()).run([task])
    monkeypatch.setattr(vae_decode, "Pixels", Full)
    stage = VaeDecode(decoder())
    state = stage.start(task)
    with pytest.raises(MemoryError):
        stage.step([state])
    while len({*stage.progress(state)}) > 1:
        assert stage.step([state]) == [state]
        stage.advance(state, state)
    assert stage.finish(state) == expected


def test_causal_decoders_are_recognized_by_protocol() -> None:
    assert isinstance(Frames(), CausalDecoder)
    assert not isinstance(Same(), CausalDecoder)
