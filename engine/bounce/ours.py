"""Which of our messages something is about: tokens checked, Message-IDs checked, addresses looked up in the list.

A token stands for itself: its check is a keyed hash. A Message-ID is one too, but does not tell its row; it confirms a
row that the address suggests. An address alone is anybody's word, and is only looked up among those we wrote to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from engine.bounce.classify import Named
from engine.campaign import Campaign, NoPlan, PlanUnreadable
from engine.compose.keys import KeyRing, KeysError, load_keys, read_token_table
from engine.config import NoCampaign, Settings
from engine.errors import EngineError, Exit
from engine.rows import ListChanged, ListUnreadable, RowReader, open_parquet
from formats.address import AddressError, canonical, parse_mailbox
from formats.feedback import Feedback
from formats.plan import Plan
from formats.verp import TokenForged, TokenKind, TokenMaker, TokenUnknown, read_token, short_campaign

# A token inside whatever relays made of it: `prvs=...=TOKEN`, `SRS0=...=TOKEN@...`, `https://.../u/TOKEN`.
_TOKEN = re.compile(r"(?<![0-9a-z])[butv][0-9a-z]{2}1[0-9a-f]{40}(?![0-9a-z])", re.I)
_MESSAGE_ID = re.compile(r"([0-9a-f]{32})@", re.I)
MAX_CANDIDATES = 40


class NothingToMatch(EngineError):
    """{folder} has no {what}: nothing that comes back can be matched to it."""

    exit_code = Exit.SETTINGS
    hint = "Name the campaign's folder with --campaign; a campaign has keys and tokens.json once it is planned."


class Trust(StrEnum):
    """What the match rests on."""

    TOKEN = "token"
    MESSAGE_ID = "message_id"
    ADDRESS = "address"
    NONE = ""


class Match(msgspec.Struct, frozen=True):
    """Whom a message is about. `was_forged`: a token of ours whose check does not fit, and no other that does."""

    named: Named | None = None
    trust: Trust = Trust.NONE
    kind: TokenKind | None = None
    was_forged: bool = False
    is_foreign: bool = False  # a token of a campaign or key that is not here


class OurCampaign:
    """One campaign's folder, as far as matching needs it."""

    def __init__(self, folder: Path) -> None:
        """Raises KeysError, NothingToMatch, SettingsError."""
        self.campaign = Campaign(folder)
        self.folder = folder
        self.settings: Settings | None
        try:
            self.settings = self.campaign.settings()
        except NoCampaign:
            self.settings = None
        keys_file = folder / (self.settings.keys.file if self.settings else "keys/secret.keys")
        self.ring: KeyRing = load_keys(keys_file)
        self.table = read_token_table(folder)
        if self.settings is None and not self.table.campaigns:
            raise NothingToMatch(folder=folder, what="campaign.toml and no tokens.json")
        self.plan: Plan | None
        try:
            self.plan = self.campaign.plan()
        except (NoPlan, PlanUnreadable):
            self.plan = None
        self.origins = dict(self.table.campaigns)

    @property
    def campaign_id(self) -> str:
        """The campaign that lives in this folder."""
        if self.plan is not None:
            return self.plan.campaign_id
        if self.settings is not None:
            return self.settings.campaign.id
        return next(iter(self.origins.values())).campaign_id

    @property
    def list_id(self) -> str:
        """The scope of its unsubscribes."""
        origin = self.origins.get(short_campaign(self.campaign_id))
        if origin is not None:
            return origin.list_id
        return self.settings.campaign.list_id if self.settings else "main"

    def addresses_of(self, rows: Iterable[int]) -> dict[int, str]:
        """The addresses of these rows, as the list has them; without those it does not have any more."""
        if self.plan is None:
            return {}
        wanted = sorted({row for row in rows if 0 <= row < self.plan.rows})
        try:
            picked = RowReader(self.plan, [self.plan.address_column]).pick(wanted)
        except (ListUnreadable, ListChanged):
            return {}
        return {row: str(values[0]) for row, values in picked if values[0] is not None}

    def rows_of(self, addresses: Sequence[str]) -> dict[str, int]:
        """The first row of each address (folded to lower case) that the list holds: one pass over its column."""
        if self.plan is None or not addresses:
            return {}
        wanted = pa.array(sorted({address.lower() for address in addresses}))
        found: dict[str, int] = {}
        first = 0
        for file in self.plan.files:
            try:
                parquet = open_parquet(file.path)
                for group, rows in enumerate(file.row_groups):
                    column = parquet.read_row_group(group, columns=[self.plan.address_column]).column(0)
                    lowered = pc.utf8_lower(pc.utf8_trim_whitespace(column.cast(pa.large_string())))
                    mask = pc.is_in(lowered, value_set=wanted.cast(pa.large_string()))
                    for place in pc.indices_nonzero(mask).to_pylist():
                        found.setdefault(lowered[place].as_py(), first + place)
                    first += rows
            except (ListUnreadable, pa.ArrowException, OSError):
                return found
        return found


class Ours:
    """All campaigns that a mailbox may get feedback for."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises KeysError, NothingToMatch, SettingsError."""
        self.campaigns = [OurCampaign(folder) for folder in folders]
        self._home: dict[str, OurCampaign] = {}
        for one in self.campaigns:
            self._home[short_campaign(one.campaign_id)] = one
        # Tokens of campaigns whose folder is gone still read, as long as a table tells them.
        for one in self.campaigns:
            for short in one.origins:
                self._home.setdefault(short, one)

    def home_of(self, campaign_id: str) -> OurCampaign:
        """The folder in which feedback on that campaign is recorded."""
        return self._home.get(short_campaign(campaign_id), self.campaigns[0])

    def match_token(self, feedback: Feedback) -> Match:
        """What the tokens in `feedback` say; the first genuine one counts."""
        was_forged = is_foreign = False
        for text in _candidates(feedback.token_texts):
            short = text[4:14].lower()
            home = self._home.get(short)
            rings: list[Mapping[str, bytes]] = [home.ring.keys] if home else [one.ring.keys for one in self.campaigns]
            for keys in rings:
                try:
                    token = read_token(text, keys)
                except TokenUnknown:
                    is_foreign = True
                    continue
                except TokenForged:
                    # Two houses may both have a key `k1`: under a campaign that nobody here knows it says nothing.
                    was_forged, is_foreign = was_forged or home is not None, is_foreign or home is None
                    continue
                if home is None:
                    is_foreign = True  # genuine, but nobody here knows the campaign
                    continue
                origin = home.origins.get(token.campaign)
                campaign_id = origin.campaign_id if origin else home.campaign_id
                list_id = origin.list_id if origin else home.list_id
                named = Named(campaign_id, list_id, token.row, token.is_test)
                return Match(named, Trust.TOKEN, token.kind)
        return Match(was_forged=was_forged, is_foreign=is_foreign)

    def with_addresses(self, named: Sequence[Named]) -> dict[tuple[str, int], str]:
        """(campaign, row) -> the address that the list has, looked up together."""
        rows: dict[str, set[int]] = {}
        for one in named:
            rows.setdefault(one.campaign_id, set()).add(one.row)
        return {
            (campaign_id, row): address
            for campaign_id, wanted in rows.items()
            if self.home_of(campaign_id).campaign_id == campaign_id
            for row, address in self.home_of(campaign_id).addresses_of(wanted).items()
        }

    def match_addresses(self, wanted: Mapping[int, tuple[Feedback, Sequence[str]]]) -> dict[int, Match]:
        """Feedback without a token, by the addresses it names: one look at each list for all of them.

        Where a Message-ID of ours came back, it decides between campaigns and makes the match as sure as a token.
        """
        addresses = sorted({address.lower() for _, names in wanted.values() for address in names if address})
        matches: dict[int, Match] = {}
        for one in self.campaigns:
            rows = one.rows_of(addresses)
            for key, (feedback, names) in wanted.items():
                for address in names:
                    row = rows.get(address.lower())
                    if row is None or matches.get(key, Match()).trust is Trust.MESSAGE_ID:
                        continue
                    trust = Trust.MESSAGE_ID if _is_of_row(feedback, one, row) else Trust.ADDRESS
                    if trust is Trust.ADDRESS and key in matches:
                        continue
                    matches[key] = Match(Named(one.campaign_id, one.list_id, row, address=address), trust)
        return matches


def _candidates(texts: Iterable[str]) -> list[str]:
    found = dict.fromkeys(token.lower() for text in texts for token in _TOKEN.findall(text))
    return list(found)[:MAX_CANDIDATES]


def _is_of_row(feedback: Feedback, one: OurCampaign, row: int) -> bool:
    """Whether a Message-ID in `feedback` is the one we gave to this row."""
    told = {found[1].lower() for text in feedback.message_ids if (found := _MESSAGE_ID.match(text))}
    if not told:
        return False
    origin = one.origins.get(short_campaign(one.campaign_id))
    key_id = origin.key_id if origin else one.ring.current_id
    try:
        key = one.ring.key(key_id)
    except KeysError:
        return False
    return TokenMaker(one.campaign_id, key_id, key).marks(row).message_id in told


def canonical_or_none(address: str) -> str | None:
    """The form that suppressions compare, None where it is no mailbox."""
    try:
        return canonical(parse_mailbox(address))
    except AddressError:
        return None
