"""Writes `sample_data/list.parquet`, the 1,000 rows of the demonstration, and the 100 that `engine init` copies.

    python sample_data/make.py

Every address is on a reserved domain (RFC 2606), so that no mistake can reach anyone. The same seed writes the same
rows. The lists are mixed: providers follow each other in random order, as `engine prepare` leaves them.
"""

from __future__ import annotations

import datetime
import random
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[1]
# Domain -> share: a few large mailbox providers, some firms, and a tail of small domains.
PROVIDERS = {
    "bigmail.example": 34,
    "hooli.example": 18,
    "postbox.example": 11,
    "globe-mail.example": 7,
    "example.com": 6,
    "example.org": 5,
    "example.net": 4,
    "firm.test": 3,
    "school.test": 2,
}
TAIL_SHARE = 10
FIRST_NAMES = [
    "Anna",
    "Ben",
    "Chloé",
    "Dmitri",
    "Émile",
    "Fatima",
    "Günther",
    "Hana",
    "Ingrid",
    "José",
    "Kofi",
    "Łukasz",
    "Mei",
    "Noor",
    "Óscar",
    "Priya",
    "Quentin",
    "Renée",
    "Søren",
    "Tomás",
    "Uma",
    "Václav",
    "Wanjiru",
    "Xu",
    "Yasmin",
    "Zoë",
    "美咲",
    "Иван",
    "Ελένη",
]
ODD_NAMES = (
    'Robert "Bob"',
    "O'Neill",
    "Smith, John",
    "<b>Max</b>",
    "R&D",
    "Ann-Marie von der Lühe",
    "{{ first_name }}",
    "名前 とても長い",
    "",
)
CITIES = [
    "Oslo",
    "Zürich",
    "Kraków",
    "São Paulo",
    "Lagos",
    "München",
    "Québec",
    "Reykjavík",
    "Nairobi",
    "Osaka",
    "Αθήνα",
    "St. John's",
    "Wien",
]
# How the sink is to treat a row (engine/rehearse/steering.py). None closes the connection: what was pipelined behind it
# would be in doubt, a few rows or none by chance, and the demonstration could not say beforehand how it ends.
STEERED = (
    *(f"451-once+{n}@bigmail.example" for n in range(8)),
    *(f"451-twice+{n}@hooli.example" for n in range(4)),
    "452-once-dot+1@postbox.example",
    "450-once+1@globe-mail.example",
    "451-once-data+1@globe-mail.example",
    "greylist-1s+1@firm.test",
    "slow-2s+1@example.org",
    *(f"550+{n}@bigmail.example" for n in range(4)),
    "552+1@hooli.example",
    "554-dot+1@postbox.example",
)
PADDED = (
    "  padded.one@example.com",
    "padded.two@bigmail.example \t",
    "\ufeffpadded.three@example.org",
    "padded.four@hooli.example\u200b",
)
INTERNATIONAL = ("jörg@bücher.example", "anna@bücher.example", "ivan@почта.example")
INVALID = (
    None,
    "",
    "   ",
    "not an address",
    "two@@example.com",
    "anna@example.com, ben@example.com",
    "anna@localhost",
    "Anna <anna@example.com>",
    ".dot@example.com",
)

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("email", pa.string()),
        ("first_name", pa.string()),
        ("city", pa.string()),
        ("amount", pa.decimal128(10, 2)),
        ("joined", pa.date32()),
    ]
)


def make_list(rows: int, special: tuple[str | None, ...], seed: int) -> pa.Table:
    """`rows` rows in mixed order, `special` addresses among them."""
    rng = random.Random(seed)
    domains = [domain for domain, share in PROVIDERS.items() for _ in range(share)]
    domains += [f"small-{number:02}.example" for number in range(TAIL_SHARE)]
    ordinary = [
        f"{rng.choice(['anna', 'ben', 'chloe', 'news', 'k.lee', 'maria_s'])}.{number}@{rng.choice(domains)}"
        for number in range(rows - len(special))
    ]
    addresses: list[str | None] = [*ordinary, *special]
    rng.shuffle(addresses)
    names = [
        None if rng.random() < 0.08 else rng.choice(ODD_NAMES if rng.random() < 0.05 else FIRST_NAMES)
        for _ in addresses
    ]
    first = datetime.date(2019, 1, 1)
    return pa.table(
        {
            "id": [1000 + number for number in range(rows)],
            "email": addresses,
            "first_name": names,
            "city": [None if rng.random() < 0.03 else rng.choice(CITIES) for _ in addresses],
            "amount": [Decimal(rng.randrange(0, 50_000)).scaleb(-2) for _ in addresses],
            "joined": [first + datetime.timedelta(days=rng.randrange(2400)) for _ in addresses],
        },
        schema=SCHEMA,
    )


def make_sample() -> pa.Table:
    """The list of the demonstration: 1,000 rows."""
    return make_list(1000, (*STEERED, *PADDED, *INTERNATIONAL, *INVALID), seed=20_250_101)


def make_first() -> pa.Table:
    """The list that `engine init` copies: 100 rows, of which two bounce at the sink and two are invalid. None waits."""
    return make_list(100, ("550+1@bigmail.example", "550+2@hooli.example", *INVALID[2:4], *PADDED[:1]), seed=7)


def write(table: pa.Table, path: Path, rows_per_group: int) -> None:
    """As Parquet with several row groups, for `plan` cuts between them."""
    pq.write_table(table, path, row_group_size=rows_per_group, compression="zstd")


def main() -> None:
    """Write the lists."""
    write(make_sample(), ROOT / "sample_data" / "list.parquet", 250)
    write(make_sample(), ROOT / "engine" / "init" / "demo.parquet", 250)
    write(make_first(), ROOT / "engine" / "init" / "list.parquet", 50)


if __name__ == "__main__":
    main()
