"""One rank of several that chat together: `texts.py RANK SIZE RENDEZVOUS ROOT`, with (model, dtype)s on its input.

Each rank has the model also by itself. Keys and values go from one to the other and back: what is drawn, how far they
are apart, and what rooms were left, each rank prints as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from safetensors.torch import load, save

from tests.models.test_language import Model, task, to_the_end
from tests.models.test_vision_language import Chat, decoded, messages
from tools.tiny_language import KINDS
from unfuse.core.compute_options import ParallelDegrees
from unfuse.core.text import PREFILL_CHUNK_TOKENS
from unfuse.models import find, read_model_spec
from unfuse.models.base import RuntimeOptions
from unfuse.models.language import bytes_per_token
from unfuse.parallel.group import Group
from unfuse.stages.base import StageInput, next_states
from unfuse.stages.kv_transfer import CHUNKS, LAST_CHUNK
from unfuse.weights.gguf_model import open_files

LIMIT_S = 60.0
MOST = 12
LENGTHS = 1, 60, 560
"""Words of the prompts."""


class Ranks:
    """A model, on all ranks or on this one alone."""

    def __init__(self, folder: Path, dtype: str, group: Group | None, tokens: int = 8192) -> None:
        card, family = read_model_spec("m", folder, dtype), find(folder)
        each = bytes_per_token(family.speaks(open_files(folder)), 2 if dtype == "bfloat16" else 4)  # type: ignore[attr-defined]
        mesh = group.mesh(ParallelDegrees({"tensor": group.size})) if group else None
        run = RuntimeOptions("cpu", card.dtypes, mesh=mesh, kv=tokens * each, group=group)
        self.stages: dict[str, Any] = {spec.name: family.load(spec, folder, run) for spec in card.pipeline.stages}
        self._group = group

    def prefilled(self, given: StageInput) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Keys and values of a prompt, and portions of them, as the first rank has them."""
        prefill, portions = self.stages["prefill"], list[dict[str, Any]]()
        state = prefill.start(given)
        going = True
        while going:
            (state,) = next_states(prefill, [state])
            portions += [self._of_first(dict(block.copy())) for block in prefill.prefix_blocks(state)]
            going = len({*prefill.progress(state)}) > 1
        made = self._of_first(dict(prefill.finish(state).tensors))
        prefill.release(state)
        return made, portions

    def answered(self, given: StageInput) -> dict[str, Any]:
        """Keys and values of the chunks that an answer leaves, by digest, as the first rank has them."""
        decode, found = self.stages["decode"], dict[str, Any]()
        state = decode.start(replace(given, extends=True))
        while len({*decode.progress(state)}) > 1:
            (state,) = next_states(decode, [state])
            decode.new_chunks(state)
            for block in decode.prefix_blocks(state):
                found[block.digest] = self._of_first(dict(block.copy()))["kv"]
        decode.release(state)
        return found

    def deafen(self) -> None:
        """Have all ranks but the first one compute that all words are as likely."""
        assert self._group
        self.stages["decode"]._sequences._model._head.weight.data *= self._group.rank == 0

    def _of_first(self, tensors: dict[str, Any]) -> dict[str, Any]:
        if self._group is None:
            return {name: tensor.clone() for name, tensor in tensors.items()}
        return load(self._group.exchange(save(tensors))[0])


def apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The largest difference over the largest number."""
    assert one.keys() == other.keys() and all(one[name].shape == other[name].shape for name in one)
    pairs = [(one[name].float(), other[name].float()) for name in one if one[name].numel()]
    return max((float((a - b).abs().max() / b.abs().max()) for a, b in pairs), default=0.0)


def language(folder: Path, dtype: str, group: Group) -> dict[str, Any]:
    """Texts of a model that only reads."""
    alone, ranks = Ranks(folder, dtype, None), Ranks(folder, dtype, group)
    model = Model(folder, reference=True)
    prompts = [task(model.card, model.ids(words), max_tokens=MOST) for words in LENGTHS]
    distances, asked = [0.0], list[StageInput]()
    for given in prompts:
        (ours, portions), (own, others) = ranks.prefilled(given), alone.prefilled(given)
        again, _ = ranks.prefilled(replace(given, prefix=tuple(others)))
        last, _ = alone.prefilled(replace(given, prefix=tuple(portions)))
        distances += [apart(ours, own), apart(again, own), apart(last, own)]
        asked += [replace(given, tensors=tensors) for tensors in (ours, own, {})]
    said = task(model.card, [3 + place % 190 for place in range(PREFILL_CHUNK_TOKENS)], max_tokens=MOST)
    kept = ranks.answered(said)
    assert len(kept) == 1
    distances.append(apart(kept, alone.answered(said)))
    decode, by_one = ranks.stages["decode"], alone.stages["decode"]
    ranks.deafen()
    found = {
        "apart": max(distances),
        "one": to_the_end(by_one, [by_one.start(given) for given in asked]),
        "ranks": to_the_end(decode, [decode.start(given) for given in asked]),
        "left": [decode._sequences.usage().used],
        "room": [(one._sequences.tokens, one._sequences._kv.keys[0].shape[0]) for one in (by_one, decode)],
    }
    if (folder.name, dtype) == (KINDS[0], "float32"):
        block, lengths = decode._sequences._kv.block, [len(model.ids(words)) for words in LENGTHS]
        full = 3 * block * sum(-(-length // block) for length in lengths)  # and nothing for answers
        found["received"] = to_the_end(decode, [received(decode, given) for given in asked[::3]])
        close = Ranks(folder, dtype, group, full).stages["decode"]
        found["close"] = to_the_end(close, [close.start(given) for given in asked])
        found["left"] += [close._sequences.usage().used, close._sequences.retracted]
    return found


def received(decode: Any, given: StageInput) -> Any:
    """The state of a text whose keys and values came in pieces of odd lengths."""
    taking = decode.receive(given.derived, given.priority, given.tensors)
    parts = [given.tensors[name].contiguous().flatten().view(torch.uint8) for name in (CHUNKS, LAST_CHUNK)]
    for piece in torch.cat(parts).split(9_999):
        taking.write(piece)
    assert taking.tokens == given.derived.prompt_tokens - 1
    return decode.start(replace(given, tensors={}, received=taking))


def sees(folder: Path, dtype: str, group: Group) -> dict[str, Any]:
    """A text of a model that sees."""
    chat = Chat(folder, messages(sorted(folder.parent.glob("*.png"))))
    alone, ranks = Ranks(folder, dtype, None), Ranks(folder, dtype, group)
    seen, own = (chat.encoded(one.stages["vision_encode"]) for one in (ranks, alone))
    ours, theirs = ranks.prefilled(chat.task(seen))[0], alone.prefilled(chat.task(seen))[0]
    decode, by_one = ranks.stages["decode"], alone.stages["decode"]
    ranks.deafen()
    asked = [chat.task(seen | ours), chat.task(seen | theirs), chat.task(seen)]
    return {
        "apart": max(apart(seen, own), apart(ours, theirs)),
        "one": decoded(by_one, *asked),
        "ranks": decoded(decode, *asked),
        "left": [decode._sequences.usage().used],
    }


def main(rank: int, size: int, rendezvous: Path, root: Path) -> None:
    torch.set_num_threads(1)
    group, found = Group(rank, size, str(rendezvous), "cpu", LIMIT_S), dict[str, Any]()
    with torch.no_grad():
        for name, dtype in json.load(sys.stdin):
            look = sees if "VL" in name else language
            found[f"{name} {dtype}"] = look(root / name, dtype, group)
    print(json.dumps(found))
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
