"""A page that takes the changes over holds what a page that asks anew is told; slow pages are sent it whole."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import msgspec

from engine.control.store import Life
from engine.web.changes import changes
from engine.web.events import Feed
from engine.web.snapshot import Expected, ProviderView, Rates, Snapshot, take_snapshot
from engine.web.told import Heard, ProviderTold, Told, read_told, sums


def snapshot(at_us: int, rng: random.Random) -> Snapshot:
    """Some campaign at some moment."""
    empty = take_snapshot("k", "id", None, Expected(), {}, lambda name: Rates(), now_us=at_us, has_report=False)
    names = rng.sample([f"p{n}" for n in range(6)], rng.randint(0, 6))
    providers = [provider_view(name, rng) for name in names]
    state = rng.choice(["sending", "paused"])
    return msgspec.structs.replace(empty, providers=providers, accepted=rng.randint(0, 3), state=state)


def provider_view(name: str, rng: random.Random) -> ProviderView:
    fields: dict[str, Any] = {field: rng.randint(0, 2) for field in ProviderView.__struct_fields__}
    return ProviderView(**{**fields, "name": name, "limit": rng.choice(["", "budget"]), "slowed": {}})


def taken_over(held: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """What page.js does with a change."""
    assert change["since_us"] == held["at_us"]
    known = {one["name"]: one for one in held["providers"]}
    for name, fields in change.get("providers", {}).items():
        known[name] = {**known.get(name, {}), **fields}
    order = change.get("order", [one["name"] for one in held["providers"]])
    return {**held, **change.get("values", {}), "at_us": change["at_us"], "providers": [known[name] for name in order]}


def test_changes_lead_from_each_snapshot_to_the_next() -> None:
    rng = random.Random(13)
    before = snapshot(1, rng)
    held = msgspec.to_builtins(before)
    for at_us in range(2, 300):
        after = snapshot(at_us, rng)
        held = taken_over(held, json.loads(msgspec.json.encode(changes(before, after))))
        assert held == msgspec.to_builtins(after)
        before = after


def test_what_did_not_change_is_not_sent() -> None:
    one = snapshot(1, random.Random(5))
    later = msgspec.structs.replace(one, at_us=2, accepted=one.accepted + 1)
    assert json.loads(msgspec.json.encode(changes(one, later))) == {
        "since_us": 1,
        "at_us": 2,
        "values": {"accepted": one.accepted + 1},
    }


def test_a_page_that_missed_one_is_sent_the_whole_and_encoding_is_done_once() -> None:
    rng = random.Random(1)

    async def look() -> None:
        feed = Feed()
        assert feed.since(0) == b""
        feed.viewers = 2
        feed.put(snapshot(1, rng))
        assert feed.since(0).startswith(b"event: snapshot\n")
        feed.put(snapshot(2, rng))
        assert feed.since(1).startswith(b"event: changes\n")
        assert feed.since(1) is feed.since(1)
        feed.put(snapshot(3, rng))
        assert feed.since(1).startswith(b"event: snapshot\n")
        assert feed.since(0) is feed.since(1)
        assert feed.since(3) == b""
        # Nobody looked while this came: whoever comes now is sent the whole.
        feed.viewers = 0
        feed.put(snapshot(4, rng))
        assert feed.since(3).startswith(b"event: snapshot\n")

    asyncio.run(look())


def test_counters_of_any_sender_are_read_or_are_none() -> None:
    assert read_told('{"accepted": 3, "unknown": [1, {"a": 2}], "left": null}').accepted == 3
    for broken in ("", "[]", '{"accepted": "many"}', '{"providers": 7}', '{"keys": [[1]]}', "null"):
        assert read_told(broken) == Told()
    assert read_told({"providers": {"gmail": {"accepted": 2}}}).providers["gmail"].accepted == 2
    old = read_told('{"keys": [["first", "gmail", 5, 4, 3, 2, null]]}').keys[0]
    assert (old.refused, old.rejected, old.lost) == (4, 0, 0)


def test_what_is_so_now_counts_from_living_senders_alone() -> None:
    def heard(id_: str, renewed_us: int) -> Heard:
        told = Told(providers={"gmail": ProviderTold(accepted=10, connections=2, limit="budget: 2 connections")})
        words: dict[str, Any] = {"sender": "a", "pid": 1, "partition": 0, "state": Life.ALIVE, "started_at_us": 0}
        return Heard(**words, id=id_, renewed_at_us=renewed_us, lease_us=100, told=told, has_told=True)

    gmail = sums([heard("old", 0), heard("new", 1000)], now_us=1050)["gmail"]
    assert (gmail.accepted, gmail.connections, gmail.limit) == (20, 2, "budget: 2 connections")
