"""Who gets a key's connections and messages. Pure: a desk goes in, decisions are appended, the next look comes out.

The worker with the fewest slots among those with rows waiting, the longest waiting first. Slots return by themselves
when connections end (after N messages, when idle); they are revoked only where that would take long: from workers
without rows, from a worker with two more than another that waits, and, where the limit is smaller than the number of
workers, one at a time after a turn of `_TURN_S`. Low rates get connections only when a message may soon go.
"""

from __future__ import annotations

import heapq
import math

from engine.pace.allowance import Purse
from engine.pace.desks import Allow, Decision, Desk, Grant, Key, Revoke, Seat

_IDLE_S = 2.0  # a worker without waiting rows keeps its connections so long before another may have them
_TURN_S = 30.0  # the turn of a worker where there are fewer slots than workers
_EVEN_S = 5.0  # between two rounds of evening out
_SOON_S = 1.0  # a connection is worth opening when a message may go this soon
_QUANTUM_S = 0.05  # allowances of one key are handed out at most this often
_SHARE = 0.1  # of connections and messages, left to the others while urgent rows could use all


def share_connections(key: Key, desk: Desk, now: float, out: list[Decision]) -> float:
    """Grants and revokes for one key; when to look again."""
    allowed = desk.allowed
    free = allowed - desk.held
    if free == 1 and desk.purse is None and desk.opening is None:
        return _pass_on(key, desk, now, out)
    if free < 0:
        if free + desk.leaving < 0:
            _shrink(key, desk, -(free + desk.leaving), out)
        return math.inf
    hungry = [(seat.held - seat.leaving, seat.since, worker) for worker, seat in desk.seats.items()
              if seat.rows > 0 and seat.held - seat.leaving < seat.rows]  # fmt: skip
    if not hungry:
        return math.inf
    again = math.inf
    if free > 0:
        if desk.purse is not None:
            soon, again = _worth_opening(desk, desk.purse, now)
            free = min(free, soon)
        if desk.opening is not None and free > 0:
            may = desk.opening.available(now)
            if may < free:
                again = min(again, desk.opening.next_at(now) if not may else now + _QUANTUM_S)
            free = min(free, may)
        _fill(key, desk, hungry, free, now, out)
        if desk.held < allowed:
            return again
    return min(again, _even_out(key, desk, allowed, now, out))


def _pass_on(key: Key, desk: Desk, now: float, out: list[Decision]) -> float:
    """The steady state, nearly all of the traffic: one slot came back and goes to who has the fewest."""
    best: Seat | None = None
    best_worker = best_active = 0
    for worker, seat in desk.seats.items():
        active = seat.held - seat.leaving
        if (seat.urgent or seat.is_warm) and seat.lacking > 0:
            best, best_worker = seat, worker
            break
        if seat.rows > active and (
            best is None or active < best_active or (active == best_active and seat.since < best.since)
        ):
            best, best_worker, best_active = seat, worker, active
    if best is None:
        return math.inf
    best.held += 1
    best.got_at = now
    desk.held += 1
    out.append(Grant(best_worker, key, 1))
    # All are out now. Whether somebody should give way is asked at the next event, not for every slot.
    return now + _IDLE_S


def _fill(
    key: Key, desk: Desk, hungry: list[tuple[int, float, int]], free: int, now: float, out: list[Decision]
) -> None:
    """Gives `free` slots, one at a time to who has the fewest."""
    valid_s = math.inf if desk.opening is None else desk.opening.valid_s
    urgent = [one for one in hungry if (seat := desk.seats[one[2]]).lacking > 0 and (seat.urgent or seat.is_warm)]
    if urgent and len(urgent) < len(hungry):
        most = min(free, sum(desk.seats[worker].lacking for _, _, worker in urgent))
        _fill(key, desk, urgent, most, now, out)
        free -= most
        if not free:
            return
    if free == 1 or len(hungry) == 1:
        active, _, worker = min(hungry)
        given = {worker: min(free, desk.seats[worker].rows - active)}
    else:
        given = {}
        heapq.heapify(hungry)
        while free and hungry:
            active, since, worker = hungry[0]
            given[worker] = given.get(worker, 0) + 1
            free -= 1
            if active + 1 < desk.seats[worker].rows:
                heapq.heapreplace(hungry, (active + 1, since, worker))
            else:
                heapq.heappop(hungry)
    for worker, connections in given.items():
        if not connections:
            continue
        seat = desk.seats[worker]
        seat.held += connections
        seat.got_at = now
        desk.held += connections
        desk.is_crowded = False
        if desk.opening is not None:
            desk.opening.give(worker, connections, now)
        out.append(Grant(worker, key, connections, valid_s))


def _shrink(key: Key, desk: Desk, excess: int, out: list[Decision]) -> None:
    """Revokes `excess` slots: of workers without rows first, then of who has the most."""
    taken: dict[int, int] = {}
    heap = [
        (seat.rows > 0 and (1 + (seat.urgent > 0 or seat.is_warm)), -seat.active, worker)
        for worker, seat in desk.seats.items()
        if seat.active
    ]
    heapq.heapify(heap)
    while excess and heap:
        busy, active, worker = heap[0]
        taken[worker] = taken.get(worker, 0) + 1
        excess -= 1
        if active + 1 < 0:
            heapq.heapreplace(heap, (busy, active + 1, worker))
        else:
            heapq.heappop(heap)
    for worker, connections in taken.items():
        _revoke(key, desk, worker, connections, out)


def _even_out(key: Key, desk: Desk, allowed: int, now: float, out: list[Decision]) -> float:
    """All slots are out and somebody waits: may somebody else give one up? Returns when to ask again."""
    if desk.leaving:
        return math.inf  # some are on their way; their `closed` brings us back
    if any(seat.urgent or seat.is_warm for seat in desk.seats.values()) and _make_way(key, desk, allowed, out):
        return math.inf
    poorest = min(
        ((seat.active, seat.since, worker) for worker, seat in desk.seats.items() if seat.rows > seat.active),
        default=None,
    )
    if poorest is None:
        return math.inf
    again = math.inf
    # Workers that hold connections and have had no rows for a while.
    for worker, seat in desk.seats.items():
        if seat.active and not seat.rows:
            if now - seat.since >= _IDLE_S:
                _revoke(key, desk, worker, seat.active, out)
            else:
                again = min(again, seat.since + _IDLE_S)
    if desk.leaving:
        return again
    richest = max(
        ((seat.active, -seat.got_at, worker) for worker, seat in desk.seats.items() if seat.rows), default=None
    )
    if richest is None:
        return again
    gap = richest[0] - poorest[0]
    if gap >= 2 and desk.seats[richest[2]].urgent:
        return again
    if gap >= 2:
        if now - desk.evened_at >= _EVEN_S:
            desk.evened_at = now
            _revoke(key, desk, richest[2], gap // 2, out)
            return again
        return min(again, desk.evened_at + _EVEN_S)
    if gap == 1 and poorest[0] == 0:
        # Fewer slots than workers: turns. The oldest holder gives way, one at a time.
        turn_s = _TURN_S if desk.purse is None else max(_TURN_S, 3.0 / desk.purse.per_second)
        at = max(-richest[1], poorest[1]) + turn_s
        if now >= at:
            _revoke(key, desk, richest[2], 1, out)
        else:
            again = min(again, at)
    return again


def _make_way(key: Key, desk: Desk, allowed: int, out: list[Decision]) -> bool:
    """Urgent rows do not wait for an even share: others close connections now. Some are left to them."""
    need = sum(max(0, seat.lacking) for seat in desk.seats.values())
    if need <= 0:
        return False
    others = {
        worker: seat.active for worker, seat in desk.seats.items() if seat.active and not (seat.urgent or seat.is_warm)
    }
    keep = min(allowed - 1, max(1, math.ceil(allowed * _SHARE)))
    need = min(need, sum(others.values()) - keep)
    taken: dict[int, int] = {}
    while need > 0:
        worker = max(others, key=lambda one: others[one])
        others[worker] -= 1
        taken[worker] = taken.get(worker, 0) + 1
        need -= 1
    for worker, connections in taken.items():
        _revoke(key, desk, worker, connections, out)
    return bool(taken)


def _revoke(key: Key, desk: Desk, worker: int, connections: int, out: list[Decision]) -> None:
    desk.seats[worker].leaving += connections
    desk.leaving += connections
    out.append(Revoke(worker, key, connections))


def share_messages(key: Key, desk: Desk, purse: Purse, now: float, out: list[Decision]) -> float:
    """Allowances for one key, to workers that hold a connection and have rows; when to look again."""
    if now < desk.next_allow:
        return desk.next_allow
    takers: list[tuple[float, int, int]] = []
    for worker, seat in desk.seats.items():
        if seat.held > seat.leaving and seat.waiting:
            wants = seat.waiting - purse.holding(worker, now)
            if wants > 0:
                takers.append((seat.allowed_at, worker, wants))
    if not takers:
        return math.inf  # the next demand, grant or report brings us back
    left = purse.available(now)
    if not left:
        return purse.next_at(now)
    takers.sort()  # who was served longest ago comes first
    if any(desk.seats[worker].urgent for _, worker, _ in takers):
        left = _urgent_messages(key, desk, purse, left, takers, now, out)
    while left and takers:
        share = -(-left // len(takers))
        _, worker, wants = takers.pop(0)
        messages = min(share, wants, left)
        left -= messages
        purse.give(worker, messages, now)
        desk.seats[worker].allowed_at = now
        out.append(Allow(worker, key, messages, purse.valid_s))
    desk.next_allow = now + _QUANTUM_S
    return max(desk.next_allow, purse.next_at(now)) if takers or left == 0 else math.inf


def _urgent_messages(
    key: Key,
    desk: Desk,
    purse: Purse,
    left: int,
    takers: list[tuple[float, int, int]],
    now: float,
    out: list[Decision],
) -> int:
    """Urgent rows take what they want of `left`, but for the tenth that the others have saved up; what is left."""
    have_others = any(not desk.seats[worker].urgent for _, worker, _ in takers)
    owed = min(left, int(desk.credit)) if have_others else 0
    for place, (_, worker, wants) in enumerate(takers):
        seat = desk.seats[worker]
        messages = min(seat.urgent - purse.holding(worker, now), wants, left - owed)
        if messages <= 0:
            continue
        left -= messages
        desk.credit = min(desk.credit + messages * _SHARE, 10.0) if have_others else 0.0
        purse.give(worker, messages, now)
        seat.allowed_at = now
        out.append(Allow(worker, key, messages, purse.valid_s))
        takers[place] = (now, worker, wants - messages)
    takers[:] = [taker for taker in takers if taker[2] > 0 and not (desk.seats[taker[1]].urgent and have_others)]
    if have_others:
        desk.credit = max(0.0, desk.credit - left)
    return left


def _worth_opening(desk: Desk, purse: Purse, now: float) -> tuple[int, float]:
    """How many more connections the messages that may go soon can use, and when to ask again."""
    if purse.per_second >= 1.0:
        return desk.allowed, math.inf
    soon = purse.available(now) + purse.outstanding
    if not soon:
        at = purse.next_at(now) - _SOON_S
        if at > now:
            return 0, at
        soon = 1
    # Allowance that came back unused says that the connections there are were busy or still opening.
    return max(soon - (desk.held - desk.leaving), int(desk.is_crowded)), math.inf
