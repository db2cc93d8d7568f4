"""Facts that the server derives from a request. No client can set them.

A request carries them next to its parameters.
"""

from __future__ import annotations

import msgspec

from unfuse.core.parameters import Params
from unfuse.core.text import AnswerParsing
from unfuse.core.vision import MediaItem

PROMPT, GRAMMAR = "prompt", "grammar"
"""Attachments of a chat: its prompt as packed token ids, and the packed grammar of its answer."""

MAX_EXPECTED_TOKENS = 256  # most answers are much shorter than `max_tokens` allows


class DerivedFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The facts about one request that the server derived when it accepted it."""

    #: Number of tokens of the prompt; 0 for a request that has no tokens.
    prompt_tokens: int = 0
    #: Predicted number of tokens of each answer.
    expected_tokens: int = 0
    #: Pictures and videos in the prompt of a chat, in order. A stage that runs once for each has only that one here.
    media: tuple[MediaItem, ...] = ()
    #: Whether the answer continues a text in the prompt.
    continues: bool = False
    #: Hash of the attachment GRAMMAR; "": the answer may be any text.
    grammar: str = ""
    #: How the answer is parsed; None: it is not parsed.
    parsing: AnswerParsing | None = None
    #: Hashes of the contents of the LoRA adapters, in the order of the parameter `lora`, joined by commas.
    lora_id: str = ""
    #: The sha256 of each uploaded picture, by the name of its attachment.
    image_hashes: dict[str, str] = {}

    @property
    def attachments(self) -> tuple[str, ...]:
        """The names of all files that the gateway stores before it queues the request."""
        prompt = [PROMPT] if self.prompt_tokens else []
        grammar = [GRAMMAR] if self.grammar else []
        return tuple(dict.fromkeys([*prompt, *grammar, *self.image_hashes, *(item.upload for item in self.media)]))

    def values(self) -> Params:
        """Return the facts that are set, by name, as parameters.

        Formulas of the pipeline and the request object use them.
        """
        values: Params = {
            "prompt_tokens": self.prompt_tokens,
            "expected_tokens": self.expected_tokens,
            "shown": msgspec.json.encode(self.media).decode() if self.media else "",
            "continues": self.continues,
            "grammar": self.grammar,
            "reading": msgspec.json.encode(self.parsing).decode() if self.parsing else "",
            "lora_id": self.lora_id,
            **self.image_hashes,
        }
        return {name: value for name, value in values.items() if value}


def expected_tokens(params: Params) -> int:
    """Predict the number of tokens of an answer; 0 if the request has no `max_tokens`."""
    max_tokens = params.get("max_tokens")
    return min(max_tokens, MAX_EXPECTED_TOKENS) if isinstance(max_tokens, int) else 0
