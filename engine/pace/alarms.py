"""When an action of the reply rules is due: at the `after`-th such reply within `within_s`. Pure; times are arguments.

One policy refusal is about one message; twenty in ten minutes are about us, where they are a fair share of what this
provider answers. (Of ten thousand messages a minute, twenty are nothing.) Whoever hears of it pauses the provider and
tells the operator; that no policy refusal ever suppresses a recipient is decided in `rules`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable

import msgspec

SHARE = 0.2  # of the provider's answers since the first of them: fewer pause nobody
TELL_AGAIN_S = 3600.0
_REMEMBERED = 20_000


class Due(msgspec.Struct, frozen=True):
    """An action is due: `count` such replies came in `seconds`, `share` of what the provider answered meanwhile."""

    count: int
    seconds: float
    share: float

    def __str__(self) -> str:
        if self.count == 1:
            return "a refusal that waiting alone does not cure"
        return f"{self.count} such replies within {self.seconds:.0f} s, {self.share:.0%} of the answers"


class _Counted:
    __slots__ = ("moments", "told_at")

    def __init__(self, after: int) -> None:
        self.moments: deque[tuple[float, int]] = deque(maxlen=after)  # when, and how many answers there were before
        self.told_at: float | None = None


class Alarms:
    """Counts replies by whom they concern and the rule that judged them."""

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._answers: Counter[str] = Counter()
        self._counted: dict[tuple[Hashable, str], _Counted] = {}

    def answered(self, provider: str, count: int) -> None:
        """A provider answered so many messages, whatever it said."""
        self._answers[provider] += count

    def refused(self, who: Hashable, provider: str, rule: str, after: int, within_s: float, now: float) -> Due | None:
        """A reply with an action, `answered` before; is that due now?"""
        key = (who, rule)
        counted = self._counted.get(key)
        if counted is None or counted.moments.maxlen != after:
            if len(self._counted) >= _REMEMBERED:
                self._counted.clear()  # a list of that many refusing destinations has other troubles
            counted = self._counted[key] = _Counted(after)
        moments = counted.moments
        moments.append((now, self._answers[provider] - 1))
        first, answers = moments[0]
        if len(moments) < after or (after > 1 and now - first > within_s):
            return None
        share = after / max(after, self._answers[provider] - answers)
        if share < self._share:
            return None
        moments.clear()
        return Due(after, now - first, share)

    def may_tell(self, who: Hashable, rule: str, now: float) -> bool:
        """Whether the operator has not been told the same within the hour; asking tells."""
        counted = self._counted.get((who, rule))
        if counted is None or (counted.told_at is not None and now - counted.told_at < TELL_AGAIN_S):
            return False
        counted.told_at = now
        return True
