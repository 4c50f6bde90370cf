"""What an operator does by the page or the API, and the record of it: who, when, what, from where.

`run/actions.jsonl` in the campaign folder, one JSON object a line, appended and synced *before* the act, so that
nothing is done unrecorded; an act that fails gets a second line that says why. Senders see an act by the store, within
a second: nothing here speaks to them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from engine.campaign import Campaign, NoPlan, make_private_folder
from engine.clock import Clock
from engine.control.opening import open_store
from engine.control.store import Life, Override, Store
from engine.errors import EngineError
from engine.web.problems import Refused

_MOST_SHOWN = 100
_TAIL_BYTES = 64 * 1024


class Action(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the record."""

    at_us: int
    who: str
    what: str  # pause, resume, cancel, slow, release, start, create, suppress
    on: str = ""  # the provider, the machine
    value: str = ""
    address: str = ""  # the client's
    failed: str = ""


class Acts:
    """What one person may do to one campaign."""

    def __init__(
        self,
        campaign: Campaign,
        clock: Clock,
        who: str,
        address: str,
        open_store: Callable[[Campaign], Store] = open_store,
    ) -> None:
        self._campaign, self._clock, self._who, self._address, self._open = campaign, clock, who, address, open_store

    def pause(self) -> Action:
        """Attempt nothing new until `resume`."""
        return self._set_state("pause", "paused", allowed=("ready", "paused"))

    def resume(self) -> Action:
        """Go on."""
        return self._set_state("resume", "ready", allowed=("ready", "paused"))

    def cancel(self) -> Action:
        """End the campaign: what is in flight finishes, the rest stays unsent. Cannot be taken back here."""
        return self._set_state("cancel", "cancelled", allowed=("ready", "paused", "cancelled"))

    def _set_state(self, what: str, state: str, allowed: tuple[str, ...]) -> Action:
        with self._store() as store:
            record = store.campaign()
            if record is None:
                raise NoPlan(folder=self._campaign.folder)
            if record.state not in allowed:
                raise Refused(409, f"the campaign is {record.state}", "A cancelled campaign is planned again to go on.")
            return self._do(what, lambda: store.set_campaign_state(state))

    def slow(self, provider: str, connections: int | None, per_second: float | None, for_s: float | None) -> Action:
        """At most so many connections and messages a second to the provider, for so long; both None lifts it."""
        until_us = None if for_s is None else self._clock.wall_us() + round(for_s * 1e6)
        words = {"connections": connections, "per_second": per_second}

        def say(store: Store) -> None:
            for what, value in words.items():
                ends = until_us if value is not None else 1  # a word that ended long ago holds no more
                text = "" if value is None else f"{value:g}"
                store.set_override(Override(f"provider:{provider}", what, text, self._who, 0, ends))

        value = ", ".join(f"{what}={value:g}" for what, value in words.items() if value is not None) or "lifted"
        with self._store() as store:
            return self._do("slow", lambda: say(store), on=provider, value=value)

    def release(self, incarnation: str) -> Action:
        """End a machine's lease; its batches can be taken by others. It may still be running."""
        with self._store() as store:
            found = next((one for one in store.incarnations() if one.id == incarnation), None)
            if found is None:
                raise Refused(404, f"no machine {incarnation} in this campaign")
            if found.state is not Life.ALIVE:
                raise Refused(409, f"its lease is {found.state} already")
            by = f"operator {self._who}"
            return self._do("release", lambda: store.supersede(incarnation, by), on=incarnation, value=found.sender)

    def record(self, what: str, on: str = "", value: str = "", failed: str = "") -> Action:
        """Write a line; durable when it returns."""
        action = Action(
            at_us=self._clock.wall_us(),
            who=self._who,
            what=what,
            on=on,
            value=value,
            address=self._address,
            failed=failed,
        )
        make_private_folder(self._campaign.run)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(_file(self._campaign), flags, 0o600)
        try:
            os.write(descriptor, msgspec.json.encode(action) + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return action

    def _do(self, what: str, act: Callable[[], object], on: str = "", value: str = "") -> Action:
        action = self.record(what, on, value)
        try:
            act()
        except (EngineError, OSError) as problem:
            self.record(what, on, value, failed=str(problem))
            raise
        return action

    @contextmanager
    def _store(self) -> Any:
        store = self._open(self._campaign)
        try:
            yield store
        finally:
            store.close()


def _file(campaign: Campaign) -> Path:
    return campaign.run / "actions.jsonl"


def recorded(campaign: Campaign) -> list[Action]:
    """The last actions, the latest first. Lines that cannot be read are left out."""
    try:
        with _file(campaign).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in reversed(lines[-_MOST_SHOWN:]):
        try:
            found.append(msgspec.json.decode(line, type=Action))
        except msgspec.MsgspecError:
            continue
    return found
