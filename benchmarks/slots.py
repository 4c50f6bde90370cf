"""Slot decisions per second of one core: connections coming back and going out again, and message allowances.

python benchmarks/slots.py            a second of each
python benchmarks/slots.py --full     ten seconds of each
"""

from __future__ import annotations

import argparse
import time

from engine.pace.allowance import Rate
from engine.pace.slots import Allow, Grant, Key, Ledger, Limit

WORKERS = 8
KEYS: list[Key] = [(f"192.0.2.{n % 4}", f"provider{n}") for n in range(200)]


def connections(seconds: float) -> float:
    """Each worker's closed connections reported in messages of some twenty, one `decide` for each message."""
    ledger = Ledger(lambda _: Limit(connections=20))
    now = 0.0
    for worker in range(WORKERS):
        ledger.demand(worker, dict.fromkeys(KEYS, 1000), now)
    held: dict[tuple[int, Key], int] = {}
    for decision in ledger.decide(now):
        held[decision.worker, decision.key] = decision.connections
    decisions = 0
    begin = time.perf_counter()
    turn = 0
    while time.perf_counter() - begin < seconds:
        now += 0.001
        worker = turn % WORKERS
        for n in range(20):
            key = KEYS[(turn * 20 + n) % len(KEYS)]
            if held.get((worker, key)):
                held[worker, key] -= 1
                ledger.closed(worker, key, 1, now)
        turn += 1
        for decision in ledger.decide(now):
            assert isinstance(decision, Grant)
            place = (decision.worker, decision.key)
            held[place] = held.get(place, 0) + decision.connections
            decisions += 1
    return decisions / (time.perf_counter() - begin)


def allowances(seconds: float) -> tuple[float, float]:
    """Messages a second that could be allowed, and decisions a second, for 200 keys of 1,000 messages a second each."""
    ledger = Ledger(lambda _: Limit(connections=20, rates=(Rate(1000, 1.0),)))
    now = 0.0
    for worker in range(WORKERS):
        ledger.demand(worker, dict.fromkeys(KEYS, 10**9), now)
    decisions = messages = 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        now += 0.01
        for decision in ledger.decide(now):
            if isinstance(decision, Allow):
                ledger.spent(decision.worker, decision.key, decision.messages, now, now)
                decisions += 1
                messages += decision.messages
    spent_s = time.perf_counter() - begin
    return messages / spent_s, decisions / spent_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    seconds = 10.0 if parser.parse_args().full else 1.0
    print(f"connections: {connections(seconds):,.0f} decisions/s")
    messages, decisions = allowances(seconds)
    print(f"allowances: {messages:,.0f} messages/s allowed by {decisions:,.0f} decisions/s")


if __name__ == "__main__":
    main()
