"""Model specs: descriptions of models for the gateway and the scheduler, which load no model."""

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

MAX_NAME = 128  # characters of a model's name, as in the messages of workers
PART = r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]*"
NAME = rf"{PART}(/{PART})?"
"""Pattern of a model's name: a hub name, with or without an owner. No path matches: not /a, ./a, ../a or a/b/c."""

# A "#" in a folder's name is no separator unless COMPONENT= follows it.
_COMPONENTS = re.compile(r"#(?=\w+=.)")
UNNAMED = "model"  # the name of a model whose path has no last part


def is_name(text: str) -> bool:
    """Return whether an admin may give a model this name."""
    return len(text) <= MAX_NAME and re.fullmatch(NAME, text) is not None


def is_path(source: str) -> bool:
    """Return whether a source is a path and no hub name, by its text alone."""
    return source.startswith(("/", ".", "~")) or source.count("/") > 1


def name_of(source: str) -> str:
    """Return a model's default name: its hub name, or the last part of its path.

    Sources of single components, as in MODEL#vae=FOLDER, are ignored.
    """
    source = _COMPONENTS.split(source, maxsplit=1)[0]
    if not is_path(source):
        return source
    last_part = PurePath(source).name
    return UNNAMED if last_part in ("", "..", "~") else last_part


def without_source(text: str, source: str, name: str) -> str:
    """Return a text with the model's name for its path, and no other absolute paths."""
    if not is_path(source):
        return without_paths(text)
    path_pattern = rf"(?<![\w./~-]){re.escape(source)}(?![\w.-])"  # not the dot in a file's name, for the source "."
    return without_paths(re.sub(path_pattern, lambda _: name, text))


WORD = re.compile(r"[^\W_]+")

MAX_NAMED, MAX_CHARS = 5, 30
"""The most unknown words in a hint, and the most characters of each."""


class PromptVocabulary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The words of a prompt that a model with a small vocabulary understands."""

    #: Known words, in upper or lower case.
    words: tuple[str, ...]
    #: What the model generates. It follows "it generates" in a hint.
    makes: str

    def hint(self, model: str, prompt: str) -> str:
        """Return a sentence that names the prompt's unknown words; "" without any."""
        known = frozenset(_words(" ".join(self.words)))
        unknown = list(dict.fromkeys(word for word in _words(prompt) if word not in known))
        if not unknown:
            return ""
        listed = ", ".join(word[:MAX_CHARS] for word in unknown[:MAX_NAMED])
        suffix = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
        return f"{model} was not trained on {listed}{suffix}: it generates {self.makes}"


def _words(text: str) -> list[str]:
    """Return the words of a text in lower case, after Unicode normalization (NFKC)."""
    return WORD.findall(unicodedata.normalize("NFKC", text).lower())


class AcceptedInput(msgspec.Struct, frozen=True):
    """How many uploads of one name a request may have, and their use."""

    #: Name of the upload, or of a parameter that the model refuses (with a `max` of 0).
    name: str
    #: start: the result starts from the picture. redraw: the result is the picture, redrawn. end: the result ends with
    #: the picture. reference: the result is only conditioned on it.
    mode: Literal["start", "redraw", "reference", "end"] = "start"
    #: The fewest uploads of a request.
    min: int = 0
    #: The most uploads of a request; 0: the upload or parameter is refused.
    max: int = 1
    #: Default of the parameter `strength`, for the mode redraw.
    strength: float = 0.0


START_IMAGE = AcceptedInput(UPLOAD, min=1)
"""The accepted input of a model that always starts from a picture."""


class ModelSpec(msgspec.Struct, frozen=True):
    """A served model: its pipeline, limits, defaults, accepted inputs and the fingerprints of its weights."""

    #: Name by which requests choose the model.
    name: str
    #: Folder or hub name from which workers load the model.
    source: str
    #: Model family, which has the code.
    family: str
    #: The stages, from which each request's execution plan is compiled.
    pipeline: Pipeline
    #: Values of the modality's limits, by name (such as MediaLimits).
    limits: dict[str, int | float]
    #: Default parameters of a request.
    defaults: Params
    #: Hash of the weights, by component.
    weights: dict[str, str]
    #: Dtype, by component.
    dtypes: dict[str, str]
    #: When the model was saved, in Unix seconds; 0: unknown, as for a model from the hub.
    created: int = 0
    #: Whether a request may name LoRA adapters.
    takes_lora: bool = False
    #: Parameters that a quality stands for, by its name. A quality that is missing here changes nothing.
    quality: dict[str, Params] = {}
    #: The uploads that a request may have, and the modality's parameters that the model refuses.
    accepts: tuple[AcceptedInput, ...] = ()
    #: Why the pipeline is one single stage; "": it is divided into stages.
    undivided_reason: str = ""
    #: How a language model encodes pictures and videos; None: it accepts none.
    vision: VisionConfig | None = None
    #: Whether a result without a requested size has the shape of its start picture.
    follows_picture: bool = True
    #: For pipelines without a size parameter: each side of a result is this many times that of the start picture. 0:
    #: the pipeline has a size parameter.
    picture_scale: int = 0
    #: The words that the model understands, if it understands few. Requests with other words get a hint.
    vocabulary: PromptVocabulary | None = None
    #: Name of the class, by component. It is a part of the names of pools; a component without one is named without it.
    classes: dict[str, str] = {}

    def accepted_input(self, upload: str) -> AcceptedInput:
        """Return how many uploads of this name are accepted, and their use."""
        return next((accepted for accepted in self.accepts if accepted.name == upload), AcceptedInput(upload, max=0))

    @property
    def strengths(self) -> dict[str, float]:
        """The default strength of each upload that can be redrawn, by the upload's name."""
        return {accepted.name: accepted.strength for accepted in self.accepts if accepted.mode == "redraw"}

    def pools(self, selector: StageSelector | None = None) -> dict[str, str]:
        """Return the declared pool of each stage, by stage name.

        With `selector`, it returns those of the selected stages only.
        """
        return {
            stage.name: pool_name(stage, self.weights, self.dtypes, self.classes)
            for stage in self.pipeline.stages
            if selector is None or selector.selects(stage)
        }
