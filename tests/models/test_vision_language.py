"""Models that see, in their stages: what is encoded, prefilled and decoded apart is what the undivided model makes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from tests.integration.seen import SIZES, as_templates_read, data_url, draw, said, shown, undivided
from tools.tiny_vision import KINDS, make_vision_model
from unfuse.core.checking import check_request
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import ConfigError, InvalidParameter, PermanentError
from unfuse.core.modalities import TEXT
from unfuse.core.plan import compile_plan
from unfuse.core.text import PREFILL_CHUNK_TOKENS, pack_ids, prefix_digests
from unfuse.core.text_parameters import PromptTokens
from unfuse.core.vision import PixelBounds, VisionConfig, media_positions
from unfuse.language.tokenizer import ChatTokenizer
from unfuse.models import find, read_model_spec
from unfuse.models.base import RuntimeOptions
from unfuse.server.multimodal_messages import read_messages
from unfuse.stages.base import Stage, StageInput, next_states
from unfuse.stages.language import Decode, DecodeState, Prefill
from unfuse.stages.language_model import VisionInputs
from unfuse.stages.media import VideoWriter

MOST = 12
WORDS = "the quick brown fox jumps over a lazy dog and what is the capital of France "


class Chat:
    """A chat with a model: what gateway and scheduler make of it."""

    def __init__(self, folder: Path, messages: Sequence[dict[str, Any]], **asked: Any) -> None:
        self.folder, self.card, self.messages = folder, read_model_spec("m", folder), messages
        assert self.card.vision
        self.ids, self.shown, self.uploads = read_messages(self.card.vision, ChatTokenizer.read(folder), messages)
        self.begins = prefix_digests(self.ids, media_positions(self.card.vision, self.ids, self.shown))
        given = {"messages": messages, "temperature": 0, "max_tokens": MOST, "seed": 1, **asked}
        self.derived = DerivedFacts(prompt_tokens=len(self.ids), media=self.shown)
        self.params, _ = check_request(self.card, given, TEXT, tokens=PromptTokens(len(self.ids)))
        pools = self.card.pools()
        self.plan = compile_plan(self.card.pipeline, pools, self.params, [{"index": 0}], (), derived=self.derived)

    def stages(self, batching: Any = "batched") -> dict[str, Any]:
        """All three, with room for 4,096 tokens."""
        run = RuntimeOptions("cpu", self.card.dtypes, ComputeOptions(batching=batching), kv=1 << 24, shared_objects={})
        return {spec.name: find(self.folder).load(spec, self.folder, run) for spec in self.card.pipeline.stages}

    def encoded(self, stage: Stage) -> dict[str, Any]:
        """What is made of all that it shows."""
        made: dict[str, Any] = {}
        for planned in self.plan.stages:
            if planned.kind == stage.kind:
                assert planned.derived
                uploads = {name: self.uploads[name] for name in stage.uploads_of(planned.derived)}
                task = StageInput(self.params, {}, uploads, derived=planned.derived)
                stage.verify(task)
                made |= stage.run([task])[0].tensors
        return made

    def task(self, tensors: Mapping[str, Any], *recorded: bytes) -> StageInput:
        return StageInput(self.params, tensors, {"prompt": pack_ids(self.ids)}, recorded, derived=self.derived)


def prefilled(prefill: Prefill, task: StageInput) -> dict[str, Any]:
    prefill.verify(task)
    return {name: tensor.clone() for name, tensor in prefill.run([task])[0].tensors.items() if tensor is not None}


def decoded(decode: Decode, *tasks: StageInput) -> list[list[int]]:
    """The tokens of these, decoded together."""
    states = [decode.start(task) for task in tasks]
    while any(len({*decode.progress(state)}) > 1 for state in states):
        going = [number for number, state in enumerate(states) if len({*decode.progress(state)}) > 1]
        for number, state in zip(going, next_states(decode, [states[number] for number in going]), strict=True):
            assert isinstance(state, DecodeState)
            decode.new_chunks(state)
            states[number] = state
    for state in states:
        decode.release(state)
    return [state.ids[state.prompt :] for state in states]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    torch.set_num_threads(1)
    yield make_vision_model(tmp_path_factory.mktemp("vision") / "tiny", request.param)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    return [draw(folder / f"{number}.png", *size, number) for number, size in enumerate(SIZES)]


def messages(pictures: Sequence[Path]) -> list[dict[str, Any]]:
    """The first picture twice, so that one lies over the border of two chunks, and the second between."""
    first, second = pictures
    parts = [said(WORDS), shown(first), said(" and "), shown(second), said(WORDS * 15), shown(first), said(" what ")]
    return [{"role": "user", "content": parts}]


@pytest.fixture(scope="module")
def chats(folder: Path, pictures: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """Messages by name, and what the undivided model makes of them: all in one process, which takes long to begin.

    A video of eight frames comes as pictures, with a picture and text behind it, or in a file of two a second, last.
    """
    vision, own = read_model_spec("m", folder).vision, tmp_path_factory.mktemp("frames")
    assert vision
    side = vision.patch * vision.merge * 4
    frames = [draw(own / f"{number}.png", side, side, number) for number in range(8)]
    filmed, decoded = film(frames, own)
    listed = {"type": "video", "video": [data_url(frame) for frame in frames], "fps": 2}
    first, second = pictures
    said_of = {
        "pictures": (messages(pictures), [first, second, first], []),
        "text": ([{"role": "user", "content": WORDS}], [], []),
        "frames": (with_video(listed, first), [first], frames),
        "file": ([{"role": "user", "content": [said(WORDS), shown(first), filmed]}], [first], decoded),
    }
    made = undivided(
        [
            {
                "folder": str(folder),
                "messages": as_templates_read(one),
                "pictures": [str(file) for file in stills],
                "frames": [str(file) for file in moving],
                "fps": 2,
                "most": MOST,
            }
            for one, stills, moving in said_of.values()
        ]
    )
    return {name: (said_of[name][0], whole) for name, whole in zip(said_of, made, strict=True)}


def with_video(video: dict[str, Any], still: Path) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [said("what is "), video, said(" and "), shown(still), said("the fox")]}]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["frames", "file"])
def test_video_chat_tokens_and_logits_equal_the_undivided_model(
    folder: Path, chats: dict[str, tuple[Any, Any]], form: str
) -> None:
    """Given eight frames, then tokens and the first logits are those of the undivided model that is given these."""
    asked, whole = chats[form]
    chat = Chat(folder, asked)
    assert chat.ids == whole["prompt"]
    stages = chat.stages("exact")
    made = chat.encoded(stages["vision_encode"])
    kv = made | prefilled(stages["prefill"], chat.task(made))
    assert decoded(stages["decode"], chat.task(kv)) == decoded(stages["decode"], chat.task(made)) == [whole["ids"]]
    assert torch.allclose(first_logits(chat, stages), torch.tensor(whole["logits"][0]), atol=2e-4)


def film(frames: Sequence[Path], folder: Path) -> tuple[dict[str, Any], list[Path]]:
    """A part with an MP4 file of these, two a second, and the frames that it has."""
    recording = VideoWriter(2)
    recording.add(np.stack([np.asarray(Image.open(frame).convert("RGB")) for frame in frames]))
    (media,) = recording.finish()
    (folder / "film.mp4").write_bytes(media.data)
    with av.open(str(folder / "film.mp4")) as container:
        for number, frame in enumerate(container.decode(video=0)):
            frame.to_image().save(folder / f"decoded{number}.png")
    decoded = [folder / f"decoded{number}.png" for number in range(len(frames))]
    return {"type": "video_url", "video_url": {"url": data_url(folder / "film.mp4")}}, decoded


@pytest.mark.parametrize("frames", [2, 3])
def test_video_shorter_than_a_group_of_frames_is_sampled_whole(frames: int) -> None:
    """The last frame is repeated up to a whole group."""
    bounds = PixelBounds(1, 1 << 30)
    vision = VisionConfig(1, 2, 3, 4, 14, 2, 4, bounds, bounds)
    sampled = vision.sample_frames(frames, 25.0)
    assert sampled == [*range(frames)]
    assert vision.frame_times(sampled, 25.0) == [(frames - 1) / 50]


@given(frames=st.integers(2, 3000), rate=st.floats(1, 120), most=st.integers(2, 800))
def test_video_frames_are_sampled_as_in_transformers(frames: int, rate: float, most: int) -> None:
    """The formulas of its video processors, which need torchvision."""
    bounds = PixelBounds(1, 1 << 30)
    for timed in (True, False):
        vision = VisionConfig(1, 2, 3, 4, 14, 2, 2, bounds, bounds, images=PixelBounds(4, most), timed=timed)
        if timed:
            wanted = min(max(int(frames / rate * 2), 4), most, frames)
            expected = np.linspace(0, frames - 1, wanted).round().astype(int).tolist()
        else:
            wanted = min(max(frames / rate * 2, 4), min(most, frames) // 2 * 2, frames)
            wanted = math.floor(wanted / 2) * 2
            expected = torch.arange(0, frames, frames / wanted).int().tolist()[:wanted]
        picked = vision.sample_frames(frames, rate)
        apart = [abs(one - other) for one, other in zip(picked, expected, strict=True)]
        assert picked == sorted({*picked}) and picked[-1] < frames
        assert max(apart) <= (not timed)


@pytest.mark.slow
def test_image_chat_tokens_and_logits_equal_the_undivided_model(
    folder: Path, chats: dict[str, tuple[Any, Any]]
) -> None:
    """Given a chat that shows three pictures, and one that shows none, when they are decoded from the KV that prefill
    made, or compute it again, apart and together, then their tokens are the undivided model's, and the first token is
    drawn from the same logits."""
    (asked, whole), (text, plain) = chats["pictures"], chats["text"]
    seeing, reading = Chat(folder, asked, logprobs=True, top_logprobs=5), Chat(folder, text)
    assert seeing.ids == whole["prompt"] and len(seeing.ids) > PREFILL_CHUNK_TOKENS
    assert reading.ids == plain["prompt"] and not reading.shown
    for batching in ("batched", "exact"):
        stages = seeing.stages(batching)
        made = seeing.encoded(stages["vision_encode"])
        kv = made | prefilled(stages["prefill"], seeing.task(made))
        assert decoded(stages["decode"], seeing.task(kv)) == [whole["ids"]]
        together = decoded(stages["decode"], seeing.task(made), reading.task({}), seeing.task(kv))
        assert together == [whole["ids"], plain["ids"], whole["ids"]]
    logits = first_logits(seeing, stages)
    assert torch.allclose(logits, torch.tensor(whole["logits"][0]), atol=2e-4)


def first_logits(chat: Chat, stages: Mapping[str, Any]) -> torch.Tensor:
    """What the first token of an answer is drawn from."""
    decode = stages["decode"]
    state = decode.start(chat.task(chat.encoded(stages["vision_encode"])))
    logits = None
    while logits is None:
        (logits,) = decode._sequences.forward([state])
        state = decode.advance(state, (state.kv.length, None))
    decode.release(state)
    return logits


def test_new_attempt_resumes_an_image_chat_from_recorded_deltas(folder: Path, pictures: list[Path]) -> None:
    chat = Chat(folder, messages(pictures))
    stages = chat.stages()
    decode, made = stages["decode"], chat.encoded(stages["vision_encode"])
    (calm,) = decoded(decode, chat.task(made))
    state, recorded = decode.start(chat.task(made)), list[bytes]()
    while len(recorded) < 4:
        (state,) = next_states(decode, [state])
        recorded += decode.new_chunks(state)
    decode.release(state)
    assert decoded(decode, chat.task(made, *recorded)) == [calm]


def test_prefix_blocks_before_the_first_image_are_shared(folder: Path, pictures: list[Path]) -> None:
    """Given two prompts with a long text before pictures of one size, then the chunks before the one in which these
    begin are equal, and no others; and the second one goes on from what was computed of the first one, with the tokens
    that it gets without."""
    lead = {"role": "system", "content": WORDS * 30}
    other = draw(pictures[0].with_name("other.png"), *SIZES[0], 77)
    first, second = (Chat(folder, [lead, *messages([one, pictures[1]])]) for one in (pictures[0], other))
    assert first.ids == second.ids and first.card.vision
    place = first.ids.index(first.card.vision.picture) // PREFILL_CHUNK_TOKENS
    assert place and first.begins[:place] == second.begins[:place]
    assert not {*first.begins[place:]} & {*second.begins[place:]}
    stages = first.stages("exact")
    prefill, decode = stages["prefill"], stages["decode"]
    portions = portions_of(prefill, first.task(first.encoded(stages["vision_encode"])))
    made = second.encoded(stages["vision_encode"])
    found = msgspec.structs.replace(second.task(made), prefix=tuple(portions[:place]))
    assert prefill.start(found).done == PREFILL_CHUNK_TOKENS * place
    kv = made | prefilled(prefill, found)
    assert decoded(decode, second.task(kv)) == decoded(decode, second.task(made))


def portions_of(prefill: Prefill, task: StageInput) -> list[dict[str, Any]]:
    """What others may go on from, of a prompt that is computed."""
    state, portions = prefill.start(task), list[dict[str, Any]]()
    while len({*prefill.progress(state)}) > 1:
        (stepped,) = next_states(prefill, [state])
        assert not isinstance(stepped, Exception)
        state = stepped
        portions += [dict(block.copy()) for block in prefill.prefix_blocks(state)]
    prefill.release(state)
    return portions


def test_prefix_blocks_with_images_are_shared_only_if_images_are_equal(folder: Path, pictures: list[Path]) -> None:
    """Given two prompts that show the same and end differently, and one of the same tokens that shows another picture,
    then the second one goes on from the chunks of the first one, with the tokens that it gets without, and the third
    one, whose picture is in the first chunk, shares nothing."""
    first, second = pictures
    asked = messages(pictures)
    other = draw(first.with_name("other.png"), *SIZES[0], 77)
    begins, goes_on = Chat(folder, asked), Chat(folder, [*asked, {"role": "user", "content": WORDS}])
    differs = Chat(folder, messages([other, second]))
    assert differs.ids == begins.ids and len(begins.begins) == (len(begins.ids) - 1) // PREFILL_CHUNK_TOKENS > 0
    assert goes_on.begins[: len(begins.begins)] == begins.begins
    assert not {*differs.begins} & {*begins.begins}
    stages = begins.stages("exact")
    prefill, made = stages["prefill"], begins.encoded(stages["vision_encode"])
    portions = portions_of(prefill, begins.task(made))
    task = goes_on.task(made)
    found = msgspec.structs.replace(task, prefix=tuple(portions[: len(begins.begins)]))
    assert prefill.start(found).done == PREFILL_CHUNK_TOKENS * len(begins.begins)
    whole, shared = (prefilled(prefill, one) for one in (task, found))
    assert all(whole[name].equal(shared[name]) for name in whole)
    assert decoded(stages["decode"], goes_on.task(made | shared)) == decoded(stages["decode"], task)


def test_next_turn_reuses_prefix_blocks_with_images_and_completion(folder: Path, pictures: list[Path]) -> None:
    """Given a prompt whose last picture ends in the chunk that its answer completes, when the next turn begins with
    both, then it finds that chunk, with the bits that it has when it is computed."""
    length = len(Chat(folder, messages(pictures)).ids)
    special = {str(id): -100 for id in range(7)}
    chat = Chat(
        folder,
        messages(pictures),
        max_tokens=PREFILL_CHUNK_TOKENS - length % PREFILL_CHUNK_TOKENS + 1,
        logit_bias=special,
    )
    stages = chat.stages("exact")
    prefill, decode, made = stages["prefill"], stages["decode"], chat.encoded(stages["vision_encode"])
    portions, added = portions_of(prefill, chat.task(made)), dict[str, Any]()
    state = decode.start(msgspec.structs.replace(chat.task(made), extends=True))
    while len({*decode.progress(state)}) > 1:
        (state,) = next_states(decode, [state])
        decode.new_chunks(state)
        added |= {block.digest: block.copy() for block in decode.prefix_blocks(state)}
    decode.release(state)

    assert chat.card.vision
    ids, prefix = [*chat.ids, *state.answer, *range(20, 60)], (*portions, *added.values())
    digests = prefix_digests(ids, media_positions(chat.card.vision, ids, chat.shown))
    assert added and [*added] == [*digests[len(portions) : len(prefix)]]
    derived = msgspec.structs.replace(chat.derived, prompt_tokens=len(ids))
    task = StageInput(chat.params, made, {"prompt": pack_ids(ids)}, derived=derived)
    found = msgspec.structs.replace(task, prefix=prefix)
    assert prefill.start(found).done == PREFILL_CHUNK_TOKENS * len(prefix)
    whole, shared = (prefilled(prefill, one) for one in (task, found))
    assert all(whole[name].equal(shared[name]) for name in whole)


def test_vision_and_language_stages_load_disjoint_weights(folder: Path, pictures: list[Path]) -> None:
    stages = Chat(folder, messages(pictures)).stages()
    whole = getattr(transformers, card_kind(folder)).from_pretrained(folder).state_dict()
    tower = stages["vision_encode"]._encoder._tower
    speaks = stages["prefill"]._sequences._model
    seen = {f"model.visual.{name}" for name in tower.state_dict()}
    spoken = {f"model.language_model.{name}" for name in speaks._decoder.state_dict()} | {"lm_head.weight"}
    assert not seen & spoken
    assert seen | spoken == whole.keys()
    for name, tensor in tower.state_dict().items():
        assert tensor.equal(whole[f"model.visual.{name}"])
    for name, tensor in speaks._decoder.state_dict().items():
        assert tensor.equal(whole[f"model.language_model.{name}"])


def card_kind(folder: Path) -> str:
    (kind,) = transformers.AutoConfig.from_pretrained(folder).architectures
    return str(kind)


@given(width=st.integers(1, 3000), height=st.integers(1, 3000), patch=st.sampled_from([14, 16]))
def test_image_grid_equals_smart_resize_of_transformers(width: int, height: int, patch: int) -> None:
    bounds, side = PixelBounds(56 * 56, 14 * 14 * 4 * 1280), patch * 2
    vision = VisionConfig(1, 2, 3, 4, patch, 2, 2, bounds, bounds)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(InvalidParameter, match="at most 200"):
            vision.picture_grid(width, height)
        return
    rows, columns = (
        length // patch for length in smart_resize(height, width, side, bounds.min_pixels, bounds.max_pixels)
    )
    assert vision.picture_grid(width, height) == (1, rows, columns)


def test_rope_positions_equal_those_of_transformers(folder: Path, pictures: list[Path]) -> None:
    chat = Chat(folder, messages(pictures))
    assert chat.card.vision
    ids = torch.tensor([chat.ids])
    model = getattr(transformers, card_kind(folder)).from_pretrained(folder).model
    grids = [[one.frames, one.rows, one.columns] for one in chat.shown]
    kinds = (ids == chat.card.vision.picture).int()
    expected, delta = model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=torch.tensor(grids))
    stages = chat.stages()
    made = chat.encoded(stages["vision_encode"])
    sight = VisionInputs(chat.ids, chat.shown, made, chat.card.vision, sum("." in name for name in made) // 2)
    length = len(chat.ids)
    assert sight.positions(0, length).equal(expected[:, 0])
    assert sight.positions(length, length + 3).tolist() == [[length + int(delta) + step for step in range(3)]] * 3
    assert sight.positions(length - 2, length + 1)[:, 2].tolist() == [length + int(delta)] * 3
    assert sight.visible_rows(length - 1, length + 2) is None


def test_missing_or_wrong_size_image_embeddings_are_rejected(folder: Path, pictures: list[Path]) -> None:
    chat = Chat(folder, messages(pictures))
    stages = chat.stages()
    made = chat.encoded(stages["vision_encode"])
    name = next(iter(made))
    for wrong in ({}, {**made, name: made[name][1:]}):
        for stage in ("prefill", "decode"):
            with pytest.raises(PermanentError, match="missing or have the wrong size"):
                stages[stage].start(chat.task(wrong))
    assert stages["decode"].texts.load().used == 0 and stages["decode"].texts.load().prompts == 0


def test_video_pixel_bounds_are_read_from_new_and_legacy_config_files(tmp_path: Path) -> None:
    """Given a folder as the first of these models were published, with one file for pictures and videos, and the
    language's configuration around the vision's, then it is read as transformers reads it."""
    made = make_vision_model(tmp_path / "tiny")
    assert read_model_spec("m", made).vision.videos == PixelBounds(16 * 784, 128 * 784)  # type: ignore[union-attr]
    (made / "video_preprocessor_config.json").unlink()
    file = made / "preprocessor_config.json"
    said = {name: value for name, value in json.loads(file.read_text()).items() if name != "size"}
    file.write_text(json.dumps({**said, "min_pixels": 3136, "max_pixels": 12_845_056}))
    config = json.loads((made / "config.json").read_text())
    speaks = config.pop("text_config")
    speaks["rope_scaling"] = {"type": "mrope", "mrope_section": speaks.pop("rope_parameters")["mrope_section"]}
    (made / "config.json").write_text(json.dumps({**speaks, **config}))
    card = read_model_spec("m", made)
    assert card.vision and card.limits["max_tokens"] == 2048
    assert card.vision.videos == card.vision.pictures == PixelBounds(3136, 12_845_056)


def test_missing_image_preprocessor_config_raises_config_error(tmp_path: Path) -> None:
    made = make_vision_model(tmp_path / "tiny")
    (made / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="preprocessor_config.json, which configures image preprocessing"):
        read_model_spec("m", made)
