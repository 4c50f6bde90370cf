"""Limits that several machines share: who may use how much of each now. Pure.

A *table* is one key's entry in the store: what each machine wants and what it holds of each limit. A machine never uses
more than it holds; it may lower what it holds to what it uses at any time, and raise it only into what nobody holds. So
the sum is never above the limit, whatever is lost on the way; who changes a table changes the version that it read.

What "uses" means: open connections; messages in the sliding window of a rate, those that workers may still send
included. A count that was lowered to what the window holds never lets more through in any window that ends later, and
no window that ended earlier is touched by what another machine sends now: hence no pause at a handover.

A machine that falls silent holds until its lease ends, and then: connections for `quiet_us` more (it may be waiting for
the answer to a final dot), counts until its last possible message has left the window. What it held is spent.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

CONNECTIONS = "connections"
SPEED = "speed"  # messages a thousand seconds; keeps a day's number from going out in an hour
MESSAGES = "messages/"  # followed by the window in seconds
OPENING = "opening/"
FEW = 32  # a count below this is handed from one to the other, not divided by speed
_TURN_US = 30_000_000  # where a limit cannot be divided evenly, what is left over changes hands this often
_ALONE_S = 60.0  # a machine that is alone holds all of a window up to this length: nobody else would use it
LATE_US = 11_000_000  # allowances are good for ten seconds, and end with the lease at the latest by so much


class Holding(msgspec.Struct, frozen=True):
    """One machine's part of one key. Times are the store's."""

    until_us: int  # the grants end then, unless renewed
    quiet_us: int  # for so long after that a connection of it may still be open
    late_us: int  # for so long after that it may still send
    wanted: dict[str, int]
    held: dict[str, int]


Table = dict[str, Holding]


class Ask(msgspec.Struct, frozen=True):
    """What a machine knows of itself: the limits as its settings say, what it could use, and what it uses now."""

    limits: dict[str, int]
    wanted: dict[str, int]
    used: dict[str, int]


def settle(table: Table, me: str, ask: Ask, now_us: int, lease_us: int, quiet_us: int) -> tuple[Table, dict[str, int]]:
    """The table with our part renewed, and what we may use once it is stored; obey at once where it is less."""
    others = {id_: one for id_, one in table.items() if id_ != me and _matters(one, now_us)}
    grant: dict[str, int] = {}
    held: dict[str, int] = {}
    wanted: dict[str, int] = {}
    for name, limit in ask.limits.items():
        blocked = {id_: _blocked(one, name, now_us) for id_, one in others.items()}
        alive = {id_: one for id_, one in others.items() if now_us < one.until_us}
        wishes = {id_: one.wanted.get(name, 0) for id_, one in alive.items()}
        wanted[name] = ask.wanted.get(name, 0)
        wishes[me] = limit if not alive and _may_hold_all(name) else wanted[name]
        shareable = limit - sum(count for id_, count in blocked.items() if id_ not in alive)
        used = ask.used.get(name, 0)
        target = _target(shareable, wishes, me, used, now_us)
        if name.startswith(MESSAGES) and limit >= FEW:
            # What is in the window leaves it at the old pace and comes at the new one, by the part of the speed: to
            # stop until the window holds our new part would leave the rate unused meanwhile.
            target = max(target, min(used, shareable))
        grant[name] = max(0, min(target, limit - sum(blocked.values())))
        held[name] = max(used, grant[name])
    mine = Holding(now_us + lease_us, quiet_us, LATE_US, wanted, held)
    return {**others, me: mine}, grant


def leave(table: Table, me: str, used: dict[str, int], now_us: int) -> Table:
    """The table after we ended in order: every connection is closed, what was sent stays counted."""
    others = {id_: one for id_, one in table.items() if id_ != me and _matters(one, now_us)}
    counts = {name: count for name, count in used.items() if name not in (CONNECTIONS, SPEED) and count}
    return {**others, me: Holding(now_us, 0, 0, {}, counts)} if counts else others


def bury(table: Table, dead: set[str], now_us: int) -> Table:
    """The table after these were found dead, each of their processes: their sockets are closed, they send nothing."""
    return {
        id_: Holding(min(one.until_us, now_us), 0, min(one.late_us, 300_000), {}, one.held) if id_ in dead else one
        for id_, one in table.items()
    }


def fair(limit: int, wishes: Mapping[str, int], turn: int) -> dict[str, int]:
    """Each gets what it wants, or as much as everybody else who wants more; what is left over goes round by turns."""
    ranks = {id_: rank for rank, id_ in enumerate(sorted(wishes))}
    order = sorted(wishes, key=lambda id_: (min(wishes[id_], limit), (ranks[id_] + turn) % len(ranks)))
    left, shares = max(0, limit), {}
    for place, id_ in enumerate(order):
        shares[id_] = min(wishes[id_], left // (len(order) - place))
        left -= shares[id_]
    return shares


def _target(limit: int, wishes: dict[str, int], me: str, used: int, now_us: int) -> int:
    shares = fair(limit, wishes, now_us // _TURN_US)
    spare = max(0, limit - sum(shares.values()))
    # What nobody wants may stay where it is in use: an idle connection is kept as it would be on one machine.
    return max(shares[me], min(used, shares[me] + spare))


def span_s(name: str) -> float:
    """The window of a count; 0 for what has none."""
    return float(name.rpartition("/")[2]) if "/" in name else 0.0


def _may_hold_all(name: str) -> bool:
    return name == SPEED or 0 < span_s(name) <= _ALONE_S


def _blocked(one: Holding, name: str, now_us: int) -> int:
    return one.held.get(name, 0) if now_us < one.until_us + _after_us(one, name) else 0


def _after_us(one: Holding, name: str) -> int:
    if name == CONNECTIONS:
        return one.quiet_us
    return 0 if name == SPEED else round(span_s(name) * 1.01e6) + one.late_us


def _matters(one: Holding, now_us: int) -> bool:
    return now_us < one.until_us or any(_blocked(one, name, now_us) for name in one.held)
