"""A suppression folder and the table that machines share tell each other what they do not know yet.

The folder stays what every process of a machine asks and adds to, with the database away too. An exchange sends what
was appended to the folder's truth, and appends what others said to the table. Both remember how far they came in
`exchange.json` in the folder, written after what it says is durable: a crash repeats work, and repeating changes
nothing. Where machines say opposite things of one address at once, the order in the table holds for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from engine.errors import EngineError, Exit
from engine.lists import forgetting
from engine.lists.suppressions import Suppressions
from engine.lists.truthfile import TRUTH, frames, generation_of, locked, write_whole
from formats import suppression
from formats.suppression import ALL, Entry, Reason

STATE = "exchange.json"
LOCK = "exchange.lock"
_AT_ONCE = 50_000


class Table(Protocol):
    """What an exchange asks of the shared table."""

    def secret(self, wish: bytes) -> tuple[str, bytes]: ...
    def add(self, entries: Sequence[Entry]) -> int: ...
    def after(self, id_: int, most: int) -> list[tuple[int, Entry]]: ...
    def forget(self, addresses: Sequence[str], instead: Sequence[Entry]) -> int: ...
    def forget_older(self, before_us: int, upto_id: int) -> int: ...
    def close(self) -> None: ...


class OtherKey(EngineError):
    """People were forgotten in {folder} before it met the table, by another key than the table's."""

    exit_code = Exit.LIST
    hint = "Begin with an empty folder and import an export of this one: what its hashes stand for cannot be told."


class Exchanged(msgspec.Struct, frozen=True):
    """How many entries were new to the table, and to the folder."""

    sent: int
    taken: int


class _State(msgspec.Struct):
    table: str
    generation: str  # of the truth that `sent` counts in
    sent: int  # bytes of the truth that the table knows
    seen: int  # the last id of the table that the folder knows


class Exchange:
    """Between one folder and one table. Safe beside others who exchange or add."""

    def __init__(self, folder: Path, table: Table) -> None:
        self.folder = folder
        self._table = table

    def step(self) -> Exchanged:
        """Tell and be told everything; raises what the table raises, and goes on from there the next time."""
        with locked(self.folder, name=LOCK):
            name, key = self._table.secret(forgetting.folder_key(self.folder))
            has_its_key = forgetting.take_key(self.folder, key)
            state = self._state(name)
            sent = self._send(state, has_its_key)
            return Exchanged(sent, self._take(state, has_its_key))

    def forget(self, addresses: Sequence[str], *, now_us: int) -> int:
        """Erase canonical addresses here and in the table; how many entries named them. Other folders follow."""
        self.step()
        with locked(self.folder, name=LOCK):
            name, key = self._table.secret(b"")
            if not forgetting.take_key(self.folder, key):
                raise OtherKey(folder=self.folder)
            state = self._state(name)
            hashes = [suppression.forgotten_address(one, key) for one in sorted(set(addresses))]
            # The table first: what is erased here alone would come back from there.
            self._table.forget(addresses, [Entry(one, ALL, Reason.FORGOTTEN, "", now_us) for one in hashes])
            return forgetting.forget(self.folder, addresses, now_us=now_us, rewritten=self._moved(state))

    def forget_older(self, before_us: int) -> int:
        """Turn entries made before a time into keyed hashes, here and in the table; how many were here."""
        self.step()
        with locked(self.folder, name=LOCK):
            state = self._state(self._table.secret(b"")[0])
            turned = forgetting.forget_older(self.folder, before_us)
            # All that the table had up to `seen` is here, and its hashes are said before its names go.
            self._send(state, has_its_key=True)
            self._table.forget_older(before_us, state.seen)
            return turned

    def close(self) -> None:
        """The table's connection is closed."""
        self._table.close()

    def _state(self, table: str) -> _State:
        try:
            state = msgspec.json.decode((self.folder / STATE).read_bytes(), type=_State)
        except (FileNotFoundError, msgspec.MsgspecError):
            state = _State(table, "", 0, 0)
        if state.table != table:
            state = _State(table, "", 0, 0)
        return state

    def _keep(self, state: _State) -> None:
        write_whole(self.folder / STATE, [msgspec.json.encode(state)])

    def _moved(self, state: _State) -> Callable[[forgetting.Rewritten], None]:
        """Go on in a truth that was written anew where we were in the old one."""

        def follow(new: forgetting.Rewritten) -> None:
            state.generation, state.sent = new.generation.hex(), new.now_at(state.sent)
            self._keep(state)

        return follow

    def _send(self, state: _State, has_its_key: bool) -> int:
        truth = self.folder / TRUTH
        if not truth.exists():
            return 0
        generation = generation_of(truth)[0].hex()
        if generation != state.generation:
            # Written anew by `forget`: everything is said again, and what the table knows it does not take twice.
            state.generation, state.sent = generation, suppression.HEADER_BYTES
        before, count = state.sent, 0
        for frame in frames(truth, state.sent):
            entries = [one for one in frame.entries() if has_its_key or not one.is_forgotten]
            count += self._table.add(entries)
            state.sent = frame.end
        if state.sent != before:
            self._keep(state)
        return count

    def _take(self, state: _State, has_its_key: bool) -> int:
        count = 0
        while found := self._table.after(state.seen, _AT_ONCE):
            last = {(entry.address, entry.scope): entry for _, entry in found}
            entries = [one for one in last.values() if has_its_key or not one.is_forgotten]
            forgotten = [one.address for one in entries if one.is_forgotten and not one.lifted and one.scope == ALL]
            if forgotten and (self.folder / TRUTH).exists():
                forgetting.forget_keyed(self.folder, forgotten, rewritten=self._moved(state))
            # A folder with many entries behind its index writes the index when it is opened.
            known = Suppressions(self.folder, list_id=None)
            count += known.add(entries)
            start, end = known.appended
            if start == state.sent and generation_of(self.folder / TRUTH)[0].hex() == state.generation:
                state.sent = end  # the table need not hear its own words
            state.seen = found[-1][0]
            self._keep(state)
        return count
