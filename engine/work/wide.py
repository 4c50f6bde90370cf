"""What the throttle learnt that concerns more than one source: told to the other machines, and obeyed when they tell.

A word is kept in the store as an override with scope `signing_domain:PROVIDER` or `campaign:PROVIDER` and the
incarnation as `what`, and read by everybody with the next renewal of a lease. The stricter of what was learnt here and
there holds; what was only heard is not told again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import msgspec

from engine.control.store import Override
from engine.pace.throttle import Ceiling, Key, Kind, Throttle

WIDE_SCOPES = frozenset({Kind.SIGNING_DOMAIN.value, Kind.CAMPAIGN.value})
_SAME_S = 2.0  # pauses that end this near to each other are one


class WideWord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A ceiling of a wide key. Times are the store's."""

    name: str  # the domain or the campaign
    until_us: int = 0  # nothing goes out until then
    rate_per_s: float | None = None
    reason: str = ""


class WideWords:
    """What was told and heard, by scope."""

    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle
        self._known: dict[str, WideWord] = {}

    def news(self, now: float, store_us: int) -> dict[str, bytes]:
        """What the others do not know yet: values by scope."""
        news: dict[str, bytes] = {}
        for key, ceiling in self._throttle.wide().items():
            until_us = 0
            if ceiling.suspended_until is not None:
                until_us = store_us + round((ceiling.suspended_until - now) * 1e6)
            word = WideWord(key.name, until_us, ceiling.rate_per_s, ceiling.reason)
            scope = f"{key.kind}:{key.provider}"
            if _is_stricter(word, self._known.get(scope, WideWord(key.name))):
                self._known[scope] = word
                news[scope] = msgspec.json.encode(word)
        return news

    def hear(self, words: Iterable[Override], now: float, store_us: int) -> None:
        """Obey what other machines told. What cannot be read is left out: it may be of another version."""
        for one in words:
            kind, _, provider = one.scope.partition(":")
            with contextlib.suppress(msgspec.MsgspecError, ValueError):
                word = msgspec.json.decode(one.value, type=WideWord)
                self._known[one.scope] = word
                until = now + (word.until_us - store_us) / 1e6
                told = Ceiling(0, word.rate_per_s, None, until if until > now else None, word.reason)
                self._throttle.obey(Key(word.name, provider, Kind(kind)), told, now)


def _is_stricter(word: WideWord, known: WideWord) -> bool:
    if word.until_us > known.until_us + _SAME_S * 1e6:
        return True
    if word.rate_per_s is None:
        return False
    return known.rate_per_s is None or word.rate_per_s < 0.98 * known.rate_per_s
