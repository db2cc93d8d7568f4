"""Model cards: what the gateway and the scheduler know of a model without loading it, and what it is called."""

from __future__ import annotations

import re
import unicodedata
from pathlib import PurePath
from typing import Literal

import msgspec

from unfuse.core.modalities import UPLOAD
from unfuse.core.paths import without_paths
from unfuse.core.plan import Params, Pipeline, StageSelector, pool_name
from unfuse.core.vision import VisionConfig

MAX_NAME = 128  # characters; messages of workers hold no longer ones
PART = r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]*"
NAME = rf"{PART}(/{PART})?"
"""What an admin may call a model: as hubs do, with or without an owner. No path fits: not /a, ./a, ../a or a/b/c."""

_COMPONENTS = re.compile(r"#(?=\w+=.)")
UNNAMED = "model"


def is_name(text: str) -> bool:
    """Return whether an admin may call a model so."""
    return len(text) <= MAX_NAME and re.fullmatch(NAME, text) is not None


def is_path(source: str) -> bool:
    """Return whether a source is a path, and not a name of a hub. No disk is read."""
    return source.startswith(("/", ".", "~")) or source.count("/") > 1


def name_of(source: str) -> str:
    """Return what a model is called by default: its hub name, or the last part of its path.

    Sources of single components, as in MODEL#vae=FOLDER, are left out.
    """
    source = _COMPONENTS.split(source, maxsplit=1)[0]
    if not is_path(source):
        return source
    last = PurePath(source).name
    return UNNAMED if last in ("", "..", "~") else last


def without_source(text: str, source: str, name: str) -> str:
    """Return a text with a model's name in place of its path, and without other absolute paths."""
    if not is_path(source):
        return without_paths(text)
    whole = rf"(?<![\w./~-]){re.escape(source)}(?![\w.-])"  # not the dot in a file's name, for the source "."
    return without_paths(re.sub(whole, lambda _: name, text))


WORD = re.compile(r"[^\W_]+")

MOST_NAMED, MOST_CHARS = 5, 30
"""The most unknown words that a hint names, and the most characters that it shows of one."""


class PromptVocabulary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The words that a model knows, in any case; `makes` says what it makes, to follow the word "makes"."""

    words: tuple[str, ...]
    makes: str

    def hint(self, model: str, prompt: str) -> str:
        """Return what the model makes, and which words of the prompt it does not know; "" if it knows all."""
        known = frozenset(_words(" ".join(self.words)))
        unknown = list(dict.fromkeys(word for word in _words(prompt) if word not in known))
        if not unknown:
            return ""
        named = ", ".join(word[:MOST_CHARS] for word in unknown[:MOST_NAMED])
        more = f" and {len(unknown) - MOST_NAMED} more" if len(unknown) > MOST_NAMED else ""
        return f"{model} does not know {named}{more}: it makes {self.makes}"


def _words(text: str) -> list[str]:
    return WORD.findall(unicodedata.normalize("NFKC", text).lower())


class AcceptedInput(msgspec.Struct, frozen=True):
    """How many uploads of a name a request for a model brings, and what they are for.

    A result starts from a picture (`start`), redraws it (`redraw`), or ends with it (`end`); a `reference` is only
    seen. `strength` is the usual one of what is redrawn. A parameter with a `max` of 0 is refused.
    """

    name: str
    mode: Literal["start", "redraw", "reference", "end"] = "start"
    min: int = 0
    max: int = 1
    strength: float = 0.0


START_PICTURE = AcceptedInput(UPLOAD, min=1)
"""The input of a model that always starts from a picture."""


class ModelSpec(msgspec.Struct, frozen=True):
    """A served model: its pipeline, limits, defaults, and what identifies the weights of each component.

    `limits` maps names of a medium's limits to values. `source` is the folder or hub name that workers load the model
    from. `weights` and `dtypes` are by component name. `takes_lora`: a request may name an adapter. `quality` maps a
    quality's name to the parameters that it stands for; a name that is missing changes nothing. `accepts` lists the
    uploads of requests, and those of its medium's parameters that the model refuses. `undivided` says why it is one
    stage ("": it is not). `vision` is what a language model makes of pictures (None: it sees none).
    `follows_picture`: without a size, a result has the shape of its start picture. `picture_scale` is for pipelines
    that take no size: their results are so many times as large as the start picture (0: the pipeline takes a size).
    `vocabulary` is for models that know few words: requests whose prompts have other words get a hint.
    """

    name: str
    source: str
    family: str
    pipeline: Pipeline
    limits: dict[str, int | float]
    defaults: Params
    weights: dict[str, str]
    dtypes: dict[str, str]
    created: int = 0
    takes_lora: bool = False
    quality: dict[str, Params] = {}
    accepts: tuple[AcceptedInput, ...] = ()
    undivided: str = ""
    vision: VisionConfig | None = None
    follows_picture: bool = True
    picture_scale: int = 0
    vocabulary: PromptVocabulary | None = None

    def accepted(self, upload: str) -> AcceptedInput:
        """How many uploads of this name a request may bring, and what for."""
        return next((one for one in self.accepts if one.name == upload), AcceptedInput(upload, max=0))

    @property
    def strengths(self) -> dict[str, float]:
        """The usual strength with each upload that lets a picture be redrawn."""
        return {one.name: one.strength for one in self.accepts if one.mode == "redraw"}

    def pools(self, choice: StageSelector | None = None) -> dict[str, str]:
        """The declared pool of each stage, by stage name; of all stages, or of those that `choice` takes."""
        return {
            stage.name: pool_name(stage, self.weights, self.dtypes)
            for stage in self.pipeline.stages
            if choice is None or choice.takes(stage)
        }
