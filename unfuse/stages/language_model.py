"""One forward of a language model for many sequences of any lengths, over paged keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from unfuse.core.errors import ConfigError, PermanentError
from unfuse.core.vision import MediaItem, TokenRun, VisionConfig
from unfuse.language.paged_kv import KvSequence, PagedKvCache, Span, joined
from unfuse.stages.base import Tensors
from unfuse.stages.refusal import refusal


@dataclass(frozen=True)
class VisionRows:
    """Of a chunk of tokens: the rows that are seen, their embeddings, and what deeper layers add to them."""

    rows: Tensor
    embeddings: Tensor
    deep: list[Tensor]


class VisionInputs:
    """What a prompt shows. Positions of its tokens are (3, tokens); those behind it go on from the last, in each row.

    So does `generate` of transformers 5.23. Its forward, where nobody says positions, goes on from the largest instead
    (`rope_deltas`), which is another one where a video has just been shown.
    """

    def __init__(
        self, ids: Sequence[int], shown: Sequence[MediaItem], tensors: Tensors, vision: VisionConfig, layers: int
    ) -> None:
        """`tensors` has what was encoded, each with so many `layers` of deepstack. Raises PermanentError."""
        runs = [*vision.runs(ids, shown)]
        self._positions = _positions(len(ids), runs, vision)
        ends = ["", *(f".{layer}" for layer in range(layers))]
        self._runs = [(run.start, [_part(tensors, run, end, vision.tokens(run.grid)) for end in ends]) for run in runs]

    @property
    def ends_in_text(self) -> bool:
        """Whether the last token is text: then those behind the prompt have the positions of a longer prompt."""
        return bool((self._positions[:, -1] == self._positions[0, -1]).all())

    def positions(self, start: int, stop: int) -> Tensor:
        """(3, stop - start): those of tokens in these places."""
        length = self._positions.shape[1]
        behind = torch.arange(max(start, length), max(stop, length)) + 1 - length
        return torch.cat([self._positions[:, start:stop], self._positions[:, -1:] + behind], 1)

    def seen(self, start: int, stop: int) -> VisionRows | None:
        """What is seen of the tokens in these places; their rows count from `start`."""
        rows, values = list[Tensor](), list[list[Tensor]]()
        for place, parts in self._runs:
            first, last = max(place, start), min(place + len(parts[0]), stop)
            if first < last:
                rows.append(torch.arange(first - start, last - start))
                values.append([part[first - place : last - place] for part in parts])
        if not rows:
            return None
        embeddings, *deep = (torch.cat(layer) for layer in zip(*values, strict=True))
        return VisionRows(torch.cat(rows), embeddings, deep)


def _part(tensors: Tensors, run: TokenRun, end: str, tokens: int) -> Tensor:
    value = tensors.get(run.shown.shown + end)
    if value is None or value.ndim != 2 or value.shape[0] != run.shown.tokens:
        raise PermanentError(f"what was encoded of {run.shown.shown[:12]} is missing, or of another size")
    return value[run.first : run.first + tokens]


def _positions(length: int, runs: Sequence[TokenRun], vision: VisionConfig) -> Tensor:
    """Those of transformers: text goes on by one in all rows; what is shown has frame, row and column behind it."""
    parts: list[Tensor] = []
    place = position = 0
    for run in [*runs, None]:
        stop = run.start if run else length
        parts.append((torch.arange(stop - place) + position).expand(3, -1))
        position += stop - place
        if run is None:
            break
        frames, rows, columns = (side // by for side, by in zip(run.grid, (1, vision.merge, vision.merge), strict=True))
        paced = run.shown.images and not vision.timed
        pace = vision.pace * torch.tensor(run.shown.seconds) if paced else 1
        moments = (torch.arange(frames) * pace).long()
        axes = torch.meshgrid(moments, torch.arange(rows), torch.arange(columns), indexing="ij")
        parts.append(torch.stack(axes).reshape(3, -1) + position)
        place, position = stop + frames * rows * columns, position + max(rows, columns)
    return torch.cat(parts, 1)


PAGED = "unfuse_paged"  # the name under which transformers finds the attention over paged keys and values
LONG = 1 << 18  # bytes a run (of a layer, on average) from which reading several in place costs less than joining them

OnLayer = Callable[[int], None]

Part = tuple[KvSequence, Sequence[int]] | tuple[KvSequence, Sequence[int], VisionInputs | None]
"""A sequence, the ids of its new tokens, and what its prompt shows."""


@dataclass(frozen=True)
class _Part:
    """The rows of one sequence in a forward, and where all its tokens lie."""

    rows: slice
    spans: list[Span]


@dataclass(frozen=True)
class _Forward:
    """What attention needs to know of a forward: its parts, and where the new tokens of all of them lie."""

    kv: PagedKvCache
    parts: list[_Part]
    places: Tensor
    alone: bool
    on_layer: OnLayer | None


class LanguageModel:
    """A causal language model of transformers over paged keys and values, which have its device and dtype.

    The model is used for nothing else from then on. Raises ConfigError for one whose attention is not served.
    """

    def __init__(self, model: Any, kv: PagedKvCache) -> None:
        config = model.config.get_text_config()
        if reason := refusal(config.to_dict(), sees=config is not model.config):
            raise ConfigError(f"this model cannot be served: {reason}")
        AttentionInterface.register(PAGED, _attention)
        self._decoder, self._head = model.get_decoder(), model.get_output_embeddings()
        self._decoder.set_attn_implementation(PAGED)
        self._kv = kv

    @torch.no_grad()
    def forward(self, parts: Sequence[Part], alone: bool = False, on_layer: OnLayer | None = None) -> list[Tensor]:
        """Compute keys and values of the last tokens of each sequence, and what may follow.

        A part is a sequence, once, which has grown by its new tokens, and their ids, and what its prompt shows, if
        anything; what it has before them was computed earlier. Returns each part's float32 logits (of shape (words,))
        behind its last token. Said again, it computes the same again. All parts share a forward; `alone`, each has one
        of its own, and its bytes depend neither on mates nor on where its keys and values lie. `on_layer` hears of each
        layer, in order, when what it keeps of these tokens is in place (on the device's current stream). Raises
        ValueError for a part without tokens, or with more than its sequence has.
        """
        if not alone:
            return self._forward(parts, False, on_layer) if parts else []
        last = len(parts) - 1
        each = (self._forward([part], True, on_layer if at == last else None) for at, part in enumerate(parts))
        return [logits for (logits,) in each]

    def _forward(self, parts: Sequence[Part], alone: bool, on_layer: OnLayer | None) -> list[Tensor]:
        ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        rows: list[_Part] = []
        sights = list[tuple[slice, int, VisionInputs]]()
        for sequence, tokens, *shows in parts:
            start = sequence.length - len(tokens)
            if not tokens:
                raise ValueError("a part has no tokens, so there is nothing for logits to follow")
            rows.append(_Part(slice(len(ids), len(ids) + len(tokens)), sequence.spans()))
            sights += [(rows[-1].rows, start, sight) for sight in shows if sight]
            ids += tokens
            positions += range(start, sequence.length)
            places += (place for span in sequence.spans(start) for place in range(*span))
        device = self._kv.keys[0].device
        packed, at, where = torch.tensor([ids, positions, places], device=device)
        hidden = self._decoder(
            **(self._shown(packed, at, sights) if sights else {"input_ids": packed[None], "position_ids": at[None]}),
            use_cache=False,
            paged=_Forward(self._kv, rows, where, alone, on_layer),
        ).last_hidden_state
        ends = [part.rows.stop - 1 for part in rows]
        return [*self._head(hidden[0, ends]).float()]

    def _shown(self, ids: Tensor, positions: Tensor, sights: list[tuple[slice, int, VisionInputs]]) -> dict[str, Any]:
        """Inputs where some parts, at these rows and from these places on, belong to prompts that show something."""
        at = positions.expand(3, 1, -1).clone()
        found: list[tuple[int, VisionRows]] = []
        for rows, start, sight in sights:
            stop = start + rows.stop - rows.start
            at[:, 0, rows] = sight.positions(start, stop).to(at)
            if seen := sight.seen(start, stop):
                found.append((rows.start, seen))
        if not found:
            return {"input_ids": ids[None], "position_ids": at}
        embeddings = self._decoder.get_input_embeddings()(ids)
        places = torch.cat([first + seen.rows for first, seen in found]).to(ids.device)
        embeddings[places] = torch.cat([seen.embeddings for _, seen in found]).to(embeddings)
        given = {"inputs_embeds": embeddings[None], "position_ids": at}
        if deep := [*zip(*(seen.deep for _, seen in found), strict=True)]:
            mask = torch.zeros_like(ids, dtype=torch.bool)
            mask[places] = True
            added = [torch.cat(layer).to(embeddings) for layer in deep]
            given |= {"visual_pos_masks": mask[None], "deepstack_visual_embeds": added}
        return given


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, paged: _Forward, **_: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: keeps the new keys and values, and has each part attend to its sequence.

    `query` is (1, heads, tokens, width) of packed tokens, `key` and `value` have the heads that are kept.
    """
    layer = module.layer_idx
    keys, values = paged.kv.keys[layer], paged.kv.values[layer]
    keys.index_copy_(1, paged.places, key[0])
    values.index_copy_(1, paged.places, value[0])
    if paged.on_layer:
        paged.on_layer(layer)
    attend = _in_one_piece if paged.alone else _in_place
    made = [attend(query[0, :, part.rows], keys, values, part.spans, scaling) for part in paged.parts]
    return torch.cat(made, 1).transpose(0, 1)[None], None


def _in_one_piece(query: Tensor, keys: Tensor, values: Tensor, spans: list[Span], scaling: float) -> Tensor:
    """As transformers computes it, over keys and values that lie behind each other; a copy, if in several runs."""
    new, length = query.shape[1], sum(stop - start for start, stop in spans)
    return scaled_dot_product_attention(
        query[None],
        joined(keys, spans)[None],
        joined(values, spans)[None],
        attn_mask=causal_lower_right(new, length) if new > 1 else None,
        scale=scaling,
        enable_gqa=True,
    )[0]


def _in_place(query: Tensor, keys: Tensor, values: Tensor, spans: list[Span], scaling: float) -> Tensor:
    """For a single token, nothing is copied that lies in one run, or in long ones. Heads that share a key are its rows.

    Chunks of several tokens may copy: that is once a chunk, which computes much more with it.
    """
    heads, new, width = query.shape
    if new > 1:
        return _in_one_piece(query, keys, values, spans, scaling)
    rows = query.reshape(keys.shape[0], -1, width)
    lengths = [stop - start for start, stop in spans]
    nbytes = sum(lengths) * 2 * keys.shape[0] * width * keys.element_size()
    if len(spans) == 1 or nbytes < LONG * len(spans):
        kept = joined(keys, spans)[None], joined(values, spans)[None]
        return scaled_dot_product_attention(rows[None], *kept, scale=scaling).reshape(heads, 1, width)
    asked = (rows * scaling).mT
    scores = torch.cat([keys[:, start:stop] @ asked for start, stop in spans], 1)
    shares = torch.split_with_sizes(scores.mT.softmax(-1, torch.float32).to(query.dtype), lengths, -1)
    seen = torch.zeros_like(rows)
    for share, (start, stop) in zip(shares, spans, strict=True):
        seen = torch.baddbmm(seen, share, values[:, start:stop])
    return seen.reshape(heads, 1, width)
