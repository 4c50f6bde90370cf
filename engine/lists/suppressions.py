"""Suppressions in a folder: checked by every process, added to by any, remembered for good.

The folder holds the truth (`suppressions.log`, append-only), a lock for appenders, an index per scope that is mapped
into memory and shared by all processes, and, once somebody was forgotten, the key of their hashes. Whoever may read
the folder obeys what anybody wrote into it, within the time between two calls of `refresh`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from engine.lists.scope_index import ScopeState, hash_column
from engine.lists.truthfile import (
    KEY,
    TRUTH,
    SuppressionsUnreadable,
    append,
    create,
    cut_torn_end,
    frames,
    generation_of,
    locked,
)
from formats import suppression
from formats.suppression import ALL, Entry, Hashes, Mask

_IMPORT_BYTES = 64 << 20
_MOST_WAITS = 60  # calls of `refresh`, one a second
TAIL_ENTRIES = 50_000  # more than this behind the index, and whoever opens the folder builds it anew


class Suppressions:
    """Who must not be written to, as far as `list_id` is concerned: scope `all`, and the list's own.

    `list_id=None` obeys `all` only, as sign-up and notification mail does. A folder that does not exist is an empty
    list until something is added.
    """

    def __init__(self, folder: Path, *, list_id: str | None) -> None:
        self.folder = folder
        self.list_id = list_id
        self._scopes = [ALL] if list_id in (None, ALL) else [ALL, str(list_id)]
        self._states = {scope: ScopeState(folder, scope) for scope in self._scopes}
        self._inode = -1
        self._end = 0
        self._generation = b""
        self._key: bytes | None = None
        self._mismatches = 0
        self.appended = (0, 0)  # where in the truth the last `add` wrote
        self._waited = _MOST_WAITS  # at the start there is nothing known to go on with meanwhile
        self.refresh()

    # --- reading ---------------------------------------------------------------------------------------------------

    def check(self, canonical_addresses: Sequence[str]) -> Mask:
        """For each address whether it is suppressed. A batch of 10,000 takes about 3 ms."""
        return self.check_hashed(suppression.hash_addresses(canonical_addresses), canonical_addresses)

    def check_hashed(self, hashes: Hashes, addresses: Sequence[str]) -> Mask:
        """As `check`, where the hashes are known already; `addresses[i]` is asked only for a few."""
        found = np.zeros(len(hashes), dtype=np.bool_)
        for state in self._states.values():
            found |= state.check(hashes)
            found = self._with_forgotten(state, hashes, addresses, found)
        return found

    def __len__(self) -> int:
        """Entries obeyed: an address suppressed in both scopes counts twice."""
        return sum(state.count() for state in self._states.values())

    def refresh(self) -> bool:
        """Pick up what any process appended since; True where something was. Costs one `stat` when nothing was."""
        try:
            now = os.stat(self.folder / TRUTH)
        except FileNotFoundError:
            return False
        if now.st_ino != self._inode or any(state.has_newer_index() for state in self._states.values()):
            return self._reopen()
        if now.st_size <= self._end:
            return False
        if now.st_size - self._end > _IMPORT_BYTES:
            # An import of millions writes an index when it is through, which spares us reading them one by one. If it
            # died before that, we write the index.
            if not any(state.is_index_replaced() for state in self._states.values()) and self._waited < _MOST_WAITS:
                self._waited += 1
                return False
            self._waited = 0
            return self._reopen()
        return self._read_tail() > 0

    def _reopen(self) -> bool:
        """Read the file from its beginning: it is new to us, or was written anew (by `forget`)."""
        generation, inode, size = generation_of(self.folder / TRUTH)
        starts = [state.open_index(generation) for state in self._states.values()]
        # `forget` renames the truth first and the indexes after it. What we know stays right meanwhile.
        if self._inode != -1 and min(starts) == suppression.HEADER_BYTES < size and self._mismatches < 5:
            self._mismatches += 1
            return False
        self._mismatches = 0
        self._inode, self._generation, self._key = inode, generation, None
        for state in self._states.values():
            state.take_index()
        self._end = min(state.start for state in self._states.values())
        if self._read_tail(most=TAIL_ENTRIES) > TAIL_ENTRIES:
            self.rebuild_indexes()
        return True

    def _read_tail(self, *, most: int | None = None) -> int:
        """Entries read behind `_end`; stops early (and remembers nothing of it) once they are more than `most`."""
        count = 0
        for frame in frames(self.folder / TRUTH, self._end):
            entries = frame.entries()
            count += len(entries)
            if most is not None and count > most:
                return count
            for scope, state in self._states.items():
                state.remember([entry for entry in entries if entry.scope == scope], end=frame.end)
            self._end = frame.end
        return count

    # --- writing ---------------------------------------------------------------------------------------------------

    def add(self, entries: Sequence[Entry]) -> int:
        """Append what is not yet known, durably; how many that were. Safe against others who append.

        An address that is suppressed in the scope already stays as it is: the first reason and source are kept, and a
        later import cannot change them.
        """
        with locked(self.folder):
            self._prepare_append()
            fresh = self._unknown(entries)
            start = self._end
            if fresh:
                append(self.folder / TRUTH, suppression.encode_entries(fresh))
                self._read_tail()
            self.appended = (start, self._end)
        return len(fresh)

    def _unknown(self, entries: Sequence[Entry]) -> list[Entry]:
        by_scope: dict[str, dict[str, Entry]] = {}
        for entry in entries:
            by_scope.setdefault(entry.scope, {}).setdefault(entry.address, entry)
        fresh: list[Entry] = []
        for scope, named in by_scope.items():
            looker = self if scope in self._states else Suppressions(self.folder, list_id=scope)
            known = looker._known_in(scope, list(named))
            fresh += [
                entry for entry, is_known in zip(named.values(), known, strict=True) if bool(is_known) == entry.lifted
            ]
        return fresh

    def _known_in(self, scope: str, addresses: Sequence[str]) -> Mask:
        state = self._states[scope]
        hashes = suppression.hash_addresses(addresses)
        found = state.check(hashes)
        for place, address in enumerate(addresses):
            if address.startswith("#") and "@" not in address:
                found[place] = suppression.split_forgotten(address)[1] in state.keyed
        return self._with_forgotten(state, hashes, addresses, found)

    def _with_forgotten(self, state: ScopeState, hashes: Hashes, addresses: Sequence[str], found: Mask) -> Mask:
        """`found`, and also those whose keyed hash is in the scope or, as of anybody who was forgotten, in `all`."""
        for one in {id(state): state, id(self._states[ALL]): self._states[ALL]}.values():
            if not one.keyed:
                continue
            for place in np.flatnonzero(one.sieve[suppression.sieve_of(hashes)] & ~found).tolist():
                found[place] = suppression.keyed_hash(addresses[place], self.forget_key()) in one.keyed
        return found

    def import_tables(self, tables: Iterable[pa.Table]) -> int:
        """Append many entries, all of one scope that we obey, as columns of `formats.suppression.SCHEMA`; how many.

        Those known already, and repeats, are left out. The index is written at the end. Other appenders wait.
        """
        added = 0
        with locked(self.folder):
            self._prepare_append()
            written = _HashPile()
            for table in tables:
                if not table.num_rows:
                    continue
                state = self._states[table.column("scope")[0].as_py()]
                hashes = hash_column(table.column("address"))
                known = self._with_forgotten(state, hashes, _Texts(table.column("address")), state.check(hashes))
                known |= written.has(hashes)
                first = np.zeros(len(hashes), dtype=np.bool_)
                first[np.unique(hashes, return_index=True)[1]] = True
                fresh = first & ~known
                if fresh.any():
                    append(self.folder / TRUTH, suppression.encode_table(table.filter(pa.array(fresh))))
                    written.add(hashes[fresh])
                added += int(fresh.sum())
            if added > TAIL_ENTRIES:
                self.rebuild_indexes()
            elif added:
                self._read_tail()
        return added

    def _prepare_append(self) -> None:
        """Under the lock: the file exists, we know all of it, and a torn end is cut off (and kept beside it)."""
        path = self.folder / TRUTH
        if not path.exists():
            create(path)
        self.refresh()
        if os.stat(path).st_ino != self._inode:
            self._mismatches = 5
            self.refresh()
        cut_torn_end(path, self._end)

    def has_forgotten(self) -> bool:
        """Somebody in our scopes is known by a keyed hash only."""
        return any(state.keyed for state in self._states.values())

    def truth_end(self) -> int:
        """Where the last whole entry known to us ends in the truth."""
        return self._end

    def rebuild_indexes(self) -> None:
        """Write the indexes of our scopes anew, up to the truth's end, and map them."""
        with locked(self.folder, name="index.lock"):
            for state in self._states.values():
                state.rebuild(self._generation)
                state.open_index(self._generation)
                state.take_index()
            self._end = min(state.start for state in self._states.values())
        self._read_tail()

    def forget_key(self) -> bytes:
        """The secret behind the hashes of forgotten addresses; raises SuppressionsUnreadable where it is gone."""
        if self._key is None:
            try:
                self._key = (self.folder / KEY).read_bytes()
            except FileNotFoundError:
                problem = f"has forgotten entries, and its key {KEY} is gone"
                raise SuppressionsUnreadable(path=self.folder, problem=problem) from None
        return self._key


class _Texts(Sequence[str]):
    """A column of addresses of which few are asked for."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, place: Any) -> Any:
        return self._column[place].as_py()


class _HashPile:
    """Hashes that were added in pieces; two pieces of like size become one, so that there are never many."""

    def __init__(self) -> None:
        self._pieces: list[Hashes] = []

    def add(self, hashes: Hashes) -> None:
        piece = np.sort(hashes)
        while self._pieces and len(self._pieces[-1]) <= 2 * len(piece):
            piece = np.sort(np.concatenate((self._pieces.pop(), piece)))
        self._pieces.append(piece)

    def has(self, hashes: Hashes) -> Mask:
        found = np.zeros(len(hashes), dtype=np.bool_)
        for piece in self._pieces:
            found |= piece[np.minimum(np.searchsorted(piece, hashes), len(piece) - 1)] == hashes
        return found
