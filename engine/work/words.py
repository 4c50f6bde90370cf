"""The operator's words on pace (`engine slow`, the page), as the store's overrides keep them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import msgspec

from engine.control.store import Override


class Word(msgspec.Struct, frozen=True):
    """What the operator says of a provider, or of each of them; None: nothing."""

    connections: int | None = None
    per_second: float | None = None
    share: float | None = None  # of what the budget allows
    who: str = ""

    def tighter(self, other: Word) -> Word:
        """Both hold."""

        def least(a: Any, b: Any) -> Any:
            return a if b is None else b if a is None else min(a, b)

        return Word(
            least(self.connections, other.connections),
            least(self.per_second, other.per_second),
            least(self.share, other.share),
            " and ".join(dict.fromkeys(who for who in (self.who, other.who) if who)),
        )

    def __str__(self) -> str:
        parts = [f"{self.connections} connections"] if self.connections is not None else []
        parts += [f"{self.per_second:g}/s"] if self.per_second is not None else []
        parts += [f"{self.share:.0%} of its budget"] if self.share is not None else []
        return ", ".join(parts)


EACH = "*"  # in place of a provider's name: the word holds at each


def words_of(overrides: Iterable[Override]) -> dict[str, Word]:
    """The operator's words by provider. What cannot be read is left out: a store may be older or newer than we are."""
    words: dict[str, Word] = {}
    for one in overrides:
        scope, _, provider = one.scope.partition(":")
        if scope not in ("provider", "campaign") or one.what not in ("connections", "per_second", "share"):
            continue
        name = provider if scope == "provider" else EACH
        with contextlib.suppress(ValueError):
            value = max(1, int(one.value)) if one.what == "connections" else max(0.01, float(one.value))
            words[name] = msgspec.structs.replace(words.get(name, Word()), **{one.what: value}, who=one.who)
    return words
