"""Suppressions in a folder: checked by every process, added to by any, remembered for good.

The folder holds the truth (`suppressions.log`, append-only), a lock for appenders, an index per scope that is mapped
into memory and shared by all processes, and, once somebody was forgotten, the key of their hashes. Whoever may read
the folder obeys what anybody wrote into it, within the time between two calls of `refresh`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

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
            if state.keyed:
                for place in np.flatnonzero(state.sieve[suppression.sieve_of(hashes)] & ~found).tolist():
                    found[place] = suppression.keyed_hash(addresses[place], self._forget_key()) in state.keyed
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
            if fresh:
                append(self.folder / TRUTH, suppression.encode_entries(fresh))
                self._read_tail()
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
            elif state.keyed and not found[place] and state.sieve[suppression.sieve_of(hashes[place : place + 1])][0]:
                found[place] = suppression.keyed_hash(address, self._forget_key()) in state.keyed
        return found

    def add_table(self, table: pa.Table) -> int:
        """Append entries given as columns of `formats.suppression.SCHEMA`, one frame; those known already are left out.

        All are of one scope, which is one that this object obeys.
        """
        with locked(self.folder):
            self._prepare_append()
            scope = table.column("scope")[0].as_py() if table.num_rows else ALL
            hashes = hash_column(table.column("address"))
            known = self._states[scope].check(hashes)
            first = np.zeros(len(hashes), dtype=np.bool_)
            first[np.unique(hashes, return_index=True)[1]] = True
            fresh = table.filter(pa.array(first & ~known))
            if fresh.num_rows:
                append(self.folder / TRUTH, suppression.encode_table(fresh))
                self._read_tail()
        return int(fresh.num_rows)

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

    def rebuild_indexes(self) -> None:
        """Write the indexes of our scopes anew, up to the truth's end, and map them."""
        with locked(self.folder, name="index.lock"):
            for state in self._states.values():
                state.rebuild(self._generation)
                state.open_index(self._generation)
                state.take_index()
            self._end = min(state.start for state in self._states.values())
        self._read_tail()

    def _forget_key(self) -> bytes:
        if self._key is None:
            try:
                self._key = (self.folder / KEY).read_bytes()
            except FileNotFoundError:
                problem = f"has forgotten entries, and its key {KEY} is gone"
                raise SuppressionsUnreadable(path=self.folder, problem=problem) from None
        return self._key
