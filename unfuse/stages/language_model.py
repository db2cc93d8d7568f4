"""A language model over paged attention: one forward for sequences of any lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
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
from unfuse.stages.device_copies import to_device
from unfuse.stages.gathered_attention import (
    GatheredSequences,
    attend_gathered,
    block_table,
    gathered_sequences,
    split_by_length,
)
from unfuse.stages.refusal import refusal


@dataclass(frozen=True)
class VisionRows:
    """The visible tokens of a chunk: those that represent a picture or video."""

    #: Their rows in the chunk, (visible tokens,).
    rows: Tensor
    #: Their embeddings, (visible tokens, width).
    embeddings: Tensor
    #: The features that each deepstack layer adds to their hidden states, each (visible tokens, width).
    deep: list[Tensor]


class VisionInputs:
    """The pictures and videos of a prompt: embeddings and positions of its tokens.

    Positions are (3, tokens): frame, row and column (multimodal rotary positions). Positions of the answer continue
    from the prompt's last token, in each of the three. This is what `generate` of transformers 5.23 does. Its forward,
    if it gets no positions, continues from the largest position instead (`rope_deltas`). The two differ if the prompt
    ends with a video.

    `ids`: the token ids of the prompt.
    `media`: its pictures and videos.
    `tensors`: the features of each picture and video, (tokens, width), by name.
    `layers`: the number of deepstack layers.
    Raises PermanentError if features are missing or of another size.
    """

    def __init__(
        self, ids: Sequence[int], media: Sequence[MediaItem], tensors: Tensors, vision: VisionConfig, layers: int
    ) -> None:
        runs = [*vision.token_runs(ids, media)]
        self._positions = _token_positions(len(ids), runs, vision)

        suffixes = ["", *(f".{layer}" for layer in range(layers))]
        self._runs = [
            (run.start, [_run_features(tensors, run, suffix, vision.tokens(run.grid)) for suffix in suffixes])
            for run in runs
        ]

    @property
    def ends_in_text(self) -> bool:
        """Whether the last token is text.

        Then tokens after the prompt have the positions that they have in a longer prompt.
        """
        return bool((self._positions[:, -1] == self._positions[0, -1]).all())

    def positions(self, start: int, stop: int) -> Tensor:
        """Return the positions of tokens `start` to `stop`, (3, stop - start)."""
        length = self._positions.shape[1]
        steps_after_prompt = torch.arange(max(start, length), max(stop, length)) + 1 - length
        return torch.cat([self._positions[:, start:stop], self._positions[:, -1:] + steps_after_prompt], 1)

    def visible_rows(self, start: int, stop: int) -> VisionRows | None:
        """Return the visible tokens from `start` to `stop`, or None. Their rows count from `start`."""
        rows, row_features = list[Tensor](), list[list[Tensor]]()
        for run_start, features in self._runs:
            first, last = max(run_start, start), min(run_start + len(features[0]), stop)
            if first < last:
                rows.append(torch.arange(first - start, last - start))
                row_features.append([feature[first - run_start : last - run_start] for feature in features])

        if not rows:
            return None
        embeddings, *deep = (torch.cat(layer) for layer in zip(*row_features, strict=True))
        return VisionRows(torch.cat(rows), embeddings, deep)


def _run_features(tensors: Tensors, run: TokenRun, suffix: str, tokens: int) -> Tensor:
    """Return the features of one run of tokens, (tokens, width).

    `suffix`: "" for the embeddings, ".0" and so on for a deepstack layer.
    """
    features = tensors.get(run.item.content_hash + suffix)
    if features is None or features.ndim != 2 or features.shape[0] != run.item.tokens:
        raise PermanentError(f"the features of picture {run.item.content_hash[:12]} are missing or have the wrong size")
    return features[run.first : run.first + tokens]


def _token_positions(length: int, runs: Sequence[TokenRun], vision: VisionConfig) -> Tensor:
    """Return the positions of a prompt's tokens as transformers computes them, (3, length).

    Text advances all three positions by one per token. A picture or video has frame, row and column positions, counted
    from its first token. Text after it continues behind the larger of its rows and columns.
    """
    positions: list[Tensor] = []
    token_index = position = 0
    for run in [*runs, None]:
        stop = run.start if run else length
        positions.append((torch.arange(stop - token_index) + position).expand(3, -1))
        position += stop - token_index
        if run is None:
            break

        frames, rows, columns = (
            side // divisor for side, divisor in zip(run.grid, (1, vision.merge, vision.merge), strict=True)
        )
        advances_by_time = run.item.images and not vision.timed
        frame_step = vision.pace * torch.tensor(run.item.seconds) if advances_by_time else 1
        frame_positions = (torch.arange(frames) * frame_step).long()
        axes = torch.meshgrid(frame_positions, torch.arange(rows), torch.arange(columns), indexing="ij")
        positions.append(torch.stack(axes).reshape(3, -1) + position)

        token_index, position = stop + frames * rows * columns, position + max(rows, columns)
    return torch.cat(positions, 1)


#: The name under which transformers finds paged attention.
PAGED = "unfuse_paged"
#: Bytes per run of contiguous keys and values, per layer and on average, from which reading several runs in place costs
#: less than joining them.
LONG = 1 << 18

#: Called with the number of each layer, once its keys and values are written.
OnLayer = Callable[[int], None]

#: A sequence, the ids of its new tokens, and optionally the pictures and videos of its prompt.
SequenceInput = tuple[KvSequence, Sequence[int]] | tuple[KvSequence, Sequence[int], VisionInputs | None]


@dataclass(frozen=True)
class _Part:
    """One sequence in a forward."""

    #: The rows of its new tokens.
    rows: slice
    #: The positions of all its tokens in the KV cache.
    spans: list[Span]


@dataclass(frozen=True)
class _Forward:
    """The inputs of paged attention that all layers of a forward share."""

    #: The KV cache.
    kv: PagedKvCache
    #: The calls of attention, in the order of their rows: one for each of these sequences or groups.
    calls: list[_Part | GatheredSequences]
    #: The positions of the new tokens of all sequences in the KV cache, (tokens,).
    slot_mapping: Tensor
    #: Whether the forward has one sequence only, whose bytes must not depend on the positions of its KV in the cache.
    alone: bool
    #: Called after each layer, or None.
    on_layer: OnLayer | None


class LanguageModel:
    """A causal language model of transformers with paged attention and continuous batching.

    `model`: the transformers model. It is changed and must not be used otherwise afterwards.
    `kv`: the KV cache, of the model's device and dtype.
    `gathers`: whether sequences with one new token each attend in one call, over copies of their keys and values.
    Raises ConfigError for a model whose attention is not served.
    """

    def __init__(self, model: Any, kv: PagedKvCache, *, gathers: bool = False) -> None:
        config = model.config.get_text_config()
        if reason := refusal(config.to_dict(), multimodal=config is not model.config):
            raise ConfigError(f"this model cannot be served: {reason}")
        AttentionInterface.register(PAGED, _attention)
        self._decoder, self._head = model.get_decoder(), model.get_output_embeddings()
        self._decoder.set_attn_implementation(PAGED)
        self._kv = kv
        self._gathers = gathers
        self._token_bytes = kv.block_bytes // (kv.block * len(kv.keys))

    @torch.no_grad()
    def forward(
        self, parts: Sequence[SequenceInput], alone: bool = False, on_layer: OnLayer | None = None
    ) -> list[Tensor]:
        """Compute KV of the new tokens of each sequence.

        Returns float32 logits (vocabulary,) after each last token.

        `parts`: each sequence at most once. It has already been extended by its new tokens; the tokens before them were
        computed earlier.
        `alone`: each sequence gets a forward of its own, for batch invariance: its bytes depend neither on the batch
        nor on the positions of its KV in the cache. Else all share one forward.
        `on_layer`: called for each layer, in order, when its KV of these tokens is written (on the device's current
        stream). With `alone`, in the last forward only.
        A repeated call computes the same again. Raises ValueError for a part without tokens, or with more tokens than
        its sequence has.
        """
        if not alone:
            return self._forward(parts, False, on_layer) if parts else []
        last_index = len(parts) - 1
        forwards = (
            self._forward([part], True, on_layer if index == last_index else None) for index, part in enumerate(parts)
        )
        return [logits for (logits,) in forwards]

    def _forward(self, parts: Sequence[SequenceInput], alone: bool, on_layer: OnLayer | None) -> list[Tensor]:
        """Compute one forward of all parts. Returns the logits of each part."""
        groups = self._groups(parts) if self._gathers and not alone else []
        grouped = [*chain.from_iterable(groups)]
        single = sorted({*range(len(parts))}.difference(grouped))
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: dict[int, slice] = {}
        vision_parts = list[tuple[slice, int, VisionInputs]]()
        for index in (*grouped, *single):
            sequence, tokens, *optional_vision = parts[index]
            start = sequence.length - len(tokens)
            if not tokens:
                raise ValueError("a part has no tokens to compute logits for")
            rows[index] = slice(len(ids), len(ids) + len(tokens))
            vision_parts += [(rows[index], start, vision_inputs) for vision_inputs in optional_vision if vision_inputs]
            ids += tokens
            positions += range(start, sequence.length)
            slots += (slot for span in sequence.spans(start) for slot in range(*span))

        last_rows = [rows[index].stop - 1 for index in range(len(parts))]
        tables = [block_table([parts[index][0] for index in group]) for group in groups]
        # One tensor for all of them, so that there is one copy to the device.
        numbers = [ids, positions, slots, last_rows, *tables]
        packed = to_device(torch.tensor([*chain.from_iterable(numbers)]), self._kv.keys[0].device)
        packed_ids, rope_positions, slot_mapping, last, *device_tables = torch.split(packed, [*map(len, numbers)])

        calls: list[_Part | GatheredSequences] = [
            gathered_sequences(slice(rows[group[0]].start, rows[group[-1]].stop), table, self._kv.block, self._kv.dtype)
            for group, table in zip(groups, device_tables, strict=True)
        ]
        calls += [_Part(rows[index], parts[index][0].spans()) for index in single]

        hidden_states = self._decoder(
            **(
                self._vision_inputs(packed_ids, rope_positions, vision_parts)
                if vision_parts
                else {"input_ids": packed_ids[None], "position_ids": rope_positions[None]}
            ),
            use_cache=False,
            paged=_Forward(self._kv, calls, slot_mapping, alone, on_layer),
        ).last_hidden_state

        return [*self._head(hidden_states[0, last]).float()]

    def _groups(self, parts: Sequence[SequenceInput]) -> list[list[int]]:
        """Return the indices of parts that attend in one call, for each such call.

        They are several sequences with one new token each. The longest comes first.
        """
        indices = [index for index, (_, tokens, *_) in enumerate(parts) if len(tokens) == 1]
        indices.sort(key=lambda index: -parts[index][0].length)
        lengths = [parts[index][0].length for index in indices]
        groups = [indices[group] for group in split_by_length(lengths, self._kv.block, self._token_bytes)]
        return [group for group in groups if len(group) > 1]

    def _vision_inputs(
        self, ids: Tensor, positions: Tensor, vision_parts: list[tuple[slice, int, VisionInputs]]
    ) -> dict[str, Any]:
        """Return the model's inputs if some parts have prompts with pictures or videos.

        `ids`, `positions`: (tokens,).
        `vision_parts`: (rows of the part, its first position, its pictures and videos).
        """
        rope_positions = positions.expand(3, 1, -1).clone()
        visible: list[tuple[int, VisionRows]] = []
        for rows, start, vision_inputs in vision_parts:
            stop = start + rows.stop - rows.start
            rope_positions[:, 0, rows] = to_device(vision_inputs.positions(start, stop), ids.device, positions.dtype)
            if vision_rows := vision_inputs.visible_rows(start, stop):
                visible.append((rows.start, vision_rows))

        if not visible:
            return {"input_ids": ids[None], "position_ids": rope_positions}

        embeddings = self._decoder.get_input_embeddings()(ids)
        rows_on_host = torch.cat([first_row + vision_rows.rows for first_row, vision_rows in visible])
        visible_rows = to_device(rows_on_host, ids.device)
        features = torch.cat([vision_rows.embeddings for _, vision_rows in visible])
        embeddings[visible_rows] = to_device(features, ids.device, embeddings.dtype)

        inputs = {"inputs_embeds": embeddings[None], "position_ids": rope_positions}
        if deep := [*zip(*(vision_rows.deep for _, vision_rows in visible), strict=True)]:
            mask = torch.zeros_like(ids, dtype=torch.bool)
            mask[visible_rows] = True
            deepstack = [to_device(torch.cat(layer), ids.device, embeddings.dtype) for layer in deep]
            inputs |= {"visual_pos_masks": mask[None], "deepstack_visual_embeds": deepstack}
        return inputs


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, paged: _Forward, **_: Any
) -> tuple[Tensor, None]:
    """The attention backend that transformers' models call: write new KV, then attend.

    It computes paged attention by torch's `scaled_dot_product_attention`.

    Each part attends to its own sequence.

    `query`: (1, heads, tokens, width) of the packed new tokens of all parts.
    `key`, `value`: (1, KV heads, tokens, width).
    Returns (1, tokens, heads, width).
    """
    layer = module.layer_idx
    keys, values = paged.kv.keys[layer], paged.kv.values[layer]
    keys.index_copy_(1, paged.slot_mapping, key[0])
    values.index_copy_(1, paged.slot_mapping, value[0])

    if paged.on_layer:
        paged.on_layer(layer)

    attend = _attend_contiguous if paged.alone else _attend_in_place
    attended = [
        attend_gathered(query[0, :, call.rows], keys, values, call, scaling)
        if isinstance(call, GatheredSequences)
        else attend(query[0, :, call.rows], keys, values, call.spans, scaling)
        for call in paged.calls
    ]
    return (torch.cat(attended, 1) if len(attended) > 1 else attended[0]).transpose(0, 1)[None], None


def _attend_contiguous(query: Tensor, keys: Tensor, values: Tensor, spans: list[Span], scaling: float) -> Tensor:
    """Attend as transformers does, over contiguous keys and values.

    `query`: (heads, new tokens, width). `keys`, `values`: (KV heads, cache tokens, width). Returns (heads, new tokens,
    width). Several runs are copied into one.
    """
    # A single new token attends to all tokens of its sequence, so it needs no mask.
    new_tokens, length = query.shape[1], sum(stop - start for start, stop in spans)
    return scaled_dot_product_attention(
        query[None],
        joined(keys, spans)[None],
        joined(values, spans)[None],
        attn_mask=causal_lower_right(new_tokens, length) if new_tokens > 1 else None,
        scale=scaling,
        enable_gqa=True,
    )[0]


def _attend_in_place(query: Tensor, keys: Tensor, values: Tensor, spans: list[Span], scaling: float) -> Tensor:
    """Attend without a copy where that is faster. Shapes are those of `_attend_contiguous`.

    For a single new token, nothing is copied if its sequence lies in one run or in long runs. The query heads that
    share a KV head are rows of one product. Chunks of several new tokens may copy: that is once per chunk, which
    computes much more.
    """
    heads, new_tokens, width = query.shape
    if new_tokens > 1:
        return _attend_contiguous(query, keys, values, spans, scaling)

    rows = query.reshape(keys.shape[0], -1, width)
    lengths = [stop - start for start, stop in spans]
    nbytes = sum(lengths) * 2 * keys.shape[0] * width * keys.element_size()
    if len(spans) == 1 or nbytes < LONG * len(spans):
        contiguous_kv = joined(keys, spans)[None], joined(values, spans)[None]
        return scaled_dot_product_attention(rows[None], *contiguous_kv, scale=scaling).reshape(heads, 1, width)

    scaled_queries = (rows * scaling).mT
    scores = torch.cat([keys[:, start:stop] @ scaled_queries for start, stop in spans], 1)
    weights = torch.split_with_sizes(scores.mT.softmax(-1, torch.float32).to(query.dtype), lengths, -1)

    attended = torch.zeros_like(rows)
    for span_weights, (start, stop) in zip(weights, spans, strict=True):
        attended = torch.baddbmm(attended, span_weights, values[:, start:stop])
    return attended.reshape(heads, 1, width)
