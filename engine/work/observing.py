"""What a worker notices about the pace of each key, told to the supervisor with the pulse.

Judgements (pace.rules) become signals (pace.throttle) here, for siblings do not know each other. Accepted messages are
told as one observation a pulse and key; refusals one by one, for each has its own beginning and text.
"""

from __future__ import annotations

from engine.clock import Clock
from engine.pace.judgement import Class_, Judgement, Scope
from engine.pace.throttle import Signal
from engine.work.messages import Key, Seen
from formats.reply import Reply
from formats.sendlog import Verdict

# Refusals, and what was accepted between them, told one by one in a pulse. Of a flood the rest is not told.
MOST_SEEN = 1000

_BY_CLASS = {
    Class_.GREYLISTED: Signal.GREYLISTED,
    Class_.RATE: Signal.RATE,
    Class_.QUOTA: Signal.RATE,
    Class_.TOO_MANY_CONNECTIONS: Signal.TOO_MANY_CONNECTIONS,
    Class_.TOO_MANY_PER_CONNECTION: Signal.TOO_MANY_PER_CONNECTION,
    Class_.REPUTATION: Signal.REPUTATION,
    Class_.BLOCKLISTED: Signal.REPUTATION,
    Class_.SERVER_BUSY: Signal.BUSY,
    Class_.SHUTDOWN: Signal.BUSY,
    Class_.NETWORK: Signal.OTHER_4XX,
}
# Refused now, and about the mailbox: the provider works as usual.
_ABOUT_MAILBOX = frozenset({Class_.MAILBOX_FULL, Class_.RECIPIENT_RATE, Class_.RECIPIENT_REFUSES})


def signal_of(judgement: Judgement) -> Signal:
    """What a judged reply says about pace."""
    if judgement.scope is Scope.RECIPIENT:
        mailbox = judgement.class_ is not Class_.GREYLISTED
        return Signal.BOUNCED if mailbox else Signal.GREYLISTED
    found = _BY_CLASS.get(judgement.class_)
    if found is not None:
        return found
    if judgement.class_ in _ABOUT_MAILBOX:
        return Signal.BOUNCED
    return Signal.REFUSED if judgement.verdict is Verdict.REJECTED else Signal.OTHER_4XX


class Observer:
    """Collects what was seen since the last pulse."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accepted: dict[Key, tuple[int, float]] = {}
        self._seen: list[Seen] = []  # in the order in which it was seen; then what is in `_accepted`

    def accepted(self, key: Key, messages: int, reply_s: float) -> None:
        """So many were taken, `reply_s` seconds after they had started, summed up."""
        count, sum_s = self._accepted.get(key, (0, 0.0))
        self._accepted[key] = (count + messages, sum_s + reply_s)

    def refused(self, key: Key, judgement: Judgement, reply: Reply, started_at: float, accepted: int | None) -> None:
        """One was refused, after so many accepted ones on its connection."""
        now = self._clock.monotonic()
        action = judgement.action
        self._add(
            Seen(
                key=key,
                scope=judgement.scope.value,
                signal=signal_of(judgement).value,
                count=1,
                at=now,
                started_at=started_at,
                reply_s=now - started_at,
                on_connection=accepted,
                # At the first such reply only what the provider documents: the throttle measures the rest better.
                pause_s=action.pause_s if action.connections is not None or action.after > 1 else None,
                then_connections=action.connections,
                rule=judgement.rule,
                after=action.after,
                within_s=action.within_s,
                alarm=action.alarm,
                unknown=judgement.class_ is Class_.UNKNOWN_USER,
                text=str(reply)[:200],
            )
        )

    def unreachable(self, key: Key, why: str) -> None:
        """No connection, or one lost without a reply."""
        now = self._clock.monotonic()
        seen = Seen(
            key=key, scope="source", signal=Signal.UNREACHABLE.value, count=1, at=now, started_at=now, text=why[:200]
        )
        self._add(seen)

    def _add(self, seen: Seen) -> None:
        """A refusal: in its order among the accepted, or some in a hundred would look like twenty in a row."""
        if len(self._seen) >= MOST_SEEN:
            return
        accepted = self._accepted.pop(seen.key, None)
        if accepted is not None:
            self._seen.append(_taken(seen.key, *accepted, seen.at))
        self._seen.append(seen)

    def take(self) -> list[Seen]:
        """All since the last call, in its order."""
        now = self._clock.monotonic()
        seen = self._seen + [_taken(key, count, reply_s, now) for key, (count, reply_s) in self._accepted.items()]
        self._accepted, self._seen = {}, []
        return seen


def _taken(key: Key, count: int, reply_s: float, now: float) -> Seen:
    mean = reply_s / count
    return Seen(
        key=key,
        scope="source",
        signal=Signal.ACCEPTED.value,
        count=count,
        at=now,
        started_at=now - mean,
        reply_s=mean,
    )
