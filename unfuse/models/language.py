"""Language models of transformers: Llama, Qwen2, Qwen3, and Qwen3's mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import convert, to_builtins
from msgspec.structs import asdict, replace
from typing_extensions import override

from unfuse.arena.limits import available_memory, readable_bytes
from unfuse.core.card import ModelCard
from unfuse.core.errors import ConfigError
from unfuse.core.object_ref import DTYPES as WIDTHS
from unfuse.core.parameters import Room
from unfuse.core.plan import Params, Pipeline, StageSpec
from unfuse.core.vision import Vision
from unfuse.core.words import TextLimits
from unfuse.models.base import Family, Loader, Report, Runtime, weights_ids
from unfuse.models.defaults import TextServing
from unfuse.models.encoders import ENCODERS
from unfuse.stages.refusal import refusal
from unfuse.stages.specs import DECODE, PREFILL
from unfuse.weights.dtypes import choose_dtypes
from unfuse.weights.folder import SERVING, WHOLE, ModelFolder
from unfuse.weights.gguf import GGUF
from unfuse.weights.gguf_model import files_of
from unfuse.weights.source import source_of

if TYPE_CHECKING:
    from unfuse.parallel.group import Axis
    from unfuse.stages.base import Stage
    from unfuse.stages.sequences import Sequences

BLOCK = 16  # tokens of a block of the KV

DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What generation_config.json may say, in the names of our parameters."""


class LanguageFamily(Family):
    """Each is one component, which prefill and decode both load whole; that comes first among its `parts`."""

    libraries = ("transformers",)
    batches = True
    parts: tuple[str, ...] = (WHOLE,)

    @override
    def card(self, name: str, folder: Path, dtype: str = "auto") -> ModelCard:
        model = files_of(folder)
        dtypes = choose_dtypes(dtype, self.parts)
        config = self.speaks(model)
        with model.reading("model"):
            limits = TextLimits(int(config["max_position_embeddings"]), int(config["vocab_size"]))
            pipeline, vision = self.pipeline(model, dtypes), self.vision(model)
        if reason := refusal(config, sees=vision is not None):
            raise ConfigError(f"model {folder} cannot be served: {reason}")
        serving = TextServing.read(model.home)
        limits = _bounded(limits, serving.limits)
        weights = weights_ids(model, pipeline, "language")
        kv = f"kv:{weights[self.parts[0]][:12]}:{dtypes[self.parts[0]]}"
        own = {"needs": {kv: Room(BLOCK, 1, 1, ("prompt_tokens",))}, "brings": (kv,)}
        pipeline = Pipeline(
            tuple(replace(stage, **own) if stage.kind == DECODE.kind else stage for stage in pipeline.stages)
        ).spread(self.spreads(model))
        return ModelCard(
            name=name,
            source=source_of(folder),
            family="language",
            pipeline=pipeline,
            limits=asdict(limits),
            defaults=self._defaults(model) | to_builtins(serving.defaults),
            weights=weights,
            dtypes=dtypes,
            created=model.created,
            vision=vision,
        )

    def speaks(self, model: ModelFolder) -> dict[str, Any]:
        """The configuration of what speaks in it."""
        return model.config(WHOLE)

    def pipeline(self, model: ModelFolder, dtypes: Mapping[str, str]) -> Pipeline:
        """Its stages; `dtypes` are those of its parts."""
        parts = self.parts[:1]
        each = bytes_per_token(self.speaks(model), WIDTHS[dtypes[parts[0]]])
        prefill = replace(PREFILL, components=parts, room=Room(4096, each, 1, ("prompt_tokens",)))
        return Pipeline((prefill, replace(DECODE, components=parts)))

    def spreads(self, model: ModelFolder) -> dict[str, dict[str, int]]:
        """By stage kind, the kinds by which a stage may be spread over ranks, as `Spread.refusal` reads them.

        By `layers` ranks would wait for each other at each token, and by `shard` all weights would travel for it.
        """
        config = self.speaks(model)
        way = {"tensor": ENCODERS[model.kind].common({"num_key_value_heads": config["num_attention_heads"], **config})}
        return {PREFILL.kind: way, DECODE.kind: way}

    def vision(self, model: ModelFolder) -> Vision | None:
        """What it makes of pictures, if it sees any."""
        return None

    @override
    def load(self, spec: StageSpec, folder: Path, runtime: Runtime, report: Report | None = None) -> Stage:
        from unfuse.language.grammars import Grammars
        from unfuse.language.tokenizer import ChatTokenizer
        from unfuse.stages.language import Decode, Prefill

        shared, key = runtime.shared, (folder, runtime.dtypes[self.parts[0]])
        if key not in shared:
            shared[key] = self.opened(folder, runtime, report), ChatTokenizer.read(folder), Grammars(str(folder))
        opened, tokenizer, grammars = shared[key]
        stage = Prefill(opened) if spec.kind == PREFILL.kind else Decode(opened, tokenizer, grammars, runtime.group)
        stage.resources = dict.fromkeys(spec.brings, opened.tokens)
        stage.exact = runtime.options.batching == "exact"
        return stage

    def opened(self, folder: Path, runtime: Runtime, report: Report | None) -> Sequences:
        """The model with an empty KV."""
        from unfuse.stages.sequences import open_model

        files = files_of(folder)
        model = Loader(files, {WHOLE: ("transformers", files.kind)}, runtime, report).model(WHOLE)
        return open_model(model, runtime.device, self.room(folder, runtime), axis=axis_of(runtime))

    @override
    def prepare(self, folder: Path) -> None:
        import_module("unfuse.stages.language")
        getattr(import_module("transformers"), files_of(folder).kind)
        if folder.suffix == GGUF:
            import_module("gguf.quants")

    def room(self, folder: Path, runtime: Runtime) -> int:
        """How many tokens the KV has room for. Raises ConfigError where that is less than the longest text.

        Ranks have room for equally many, as the one with least has; what was set is for all of them together.
        """
        files, group, axis = files_of(folder), runtime.group, axis_of(runtime)
        each = bytes_per_token(self.speaks(files), WIDTHS[runtime.dtypes[self.parts[0]]]) // (axis.size if axis else 1)
        most, ranks = int(self.card("", folder).limits["max_tokens"]) + BLOCK, group.size if group else 1
        room = runtime.kv // ranks or _usual(runtime.device, most * each, ranks)
        if group:
            room = min(int(said) for said in group.exchange(str(room).encode()))
        if room < most * each:
            raise ConfigError(
                f"keys and values of the longest text, {most} tokens, take {readable_bytes(most * each)}; there are "
                f"{readable_bytes(room)} for them: give --kv more, or set a limit max_tokens in {files.home / SERVING}"
            )
        return room // each

    def _defaults(self, model: ModelFolder) -> Params:
        """Those of generation_config.json, if the model has one; greedy if it says that nothing is drawn."""
        said = model.beside("generation_config.json")
        found: Params = {name: said[name] for name in DEFAULTS if isinstance(said.get(name), int | float)}
        return found | ({"temperature": 0.0} if said.get("do_sample") is False else {})


def _bounded(derived: TextLimits, said: dict[str, int | float]) -> TextLimits:
    """These limits, made smaller by those of serving.json. Raises ConfigError for what is no limit, or larger."""
    known = asdict(derived)
    if unknown := sorted(said.keys() - known):
        raise ConfigError(f"{SERVING}: unknown limit {unknown[0]!r}; known are {', '.join(known)}")
    for name in ("max_tokens", "vocabulary"):
        if not 0 < said.get(name, known[name]) <= known[name]:
            raise ConfigError(f"{SERVING}: limit {name} {said[name]} must be 1 to the model's {known[name]}")
    return convert({**known, **said}, TextLimits)


def axis_of(runtime: Runtime) -> Axis | None:
    """The ranks that each have a share of the heads, if there are several."""
    return runtime.mesh.axis("tensor") if runtime.mesh and "tensor" in runtime.mesh.degrees else None


def _usual(device: str, least: int, ranks: int) -> int:
    """Default bytes for keys and values: a quarter of what is free, which CPU ranks share, or one longest text."""
    from unfuse.parallel.devices import memory

    free = available_memory() // ranks if device.startswith("cpu") else memory(device)[0]
    return max(free // 4, min(least, free // 4 * 3))


def bytes_per_token(config: dict[str, Any], width: int) -> int:
    """Bytes of the keys and values of one token, in numbers of that width."""
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or config["hidden_size"] // heads)
    return 2 * int(config["num_hidden_layers"]) * int(config.get("num_key_value_heads") or heads) * size * width


FAMILY = LanguageFamily()
