"""The words that a model's prompts may have, for models that know few."""

from __future__ import annotations

import re
import unicodedata

import msgspec

WORD = re.compile(r"[^\W_]+")

MOST_NAMED, MOST_CHARS = 5, 30
"""The most unknown words that a hint names, and the most characters that it shows of one."""


class Vocabulary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
