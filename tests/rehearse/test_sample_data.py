"""The sample list is what its README says, and what its generator writes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from engine.config import parse_settings
from engine.rehearse.steering import Phase, read_wish
from formats.address import AddressError, parse_mailbox

ROOT = Path(__file__).parents[2]


def outcomes(addresses: list[str | None]) -> dict[str, int]:
    """How many rows end how, and how many are deferred first."""
    counts = {"accepted": 0, "bounced": 0, "invalid": 0, "deferred first": 0}
    for address in addresses:
        try:
            wish = read_wish(parse_mailbox(address).local)
        except AddressError:
            counts["invalid"] += 1
            continue
        if wish is None or wish.times is not None or wish.greylist_s is not None or wish.act.is_harmless:
            counts["accepted"] += 1
            counts["deferred first"] += wish is not None and not wish.act.is_harmless
        else:
            assert wish.act.phase in (Phase.RCPT, Phase.DOT)
            counts["bounced"] += 1
    return counts


def test_the_list_is_what_its_readme_says() -> None:
    table = pq.read_table(ROOT / "sample_data" / "list.parquet")
    assert outcomes(table["email"].to_pylist()) == {
        "accepted": 985,
        "bounced": 6,
        "invalid": 9,
        "deferred first": 16,
    }
    assert len(set(table["id"].to_pylist())) == 1000


@pytest.mark.parametrize(
    ("path", "maker"),
    [
        ("sample_data/list.parquet", "make_sample"),
        ("engine/init/demo.parquet", "make_sample"),
        ("engine/init/list.parquet", "make_first"),
    ],
)
def test_the_generator_writes_the_same_rows_again(path: str, maker: str) -> None:
    made = runpy.run_path(str(ROOT / "sample_data" / "make.py"))[maker]()
    assert pq.read_table(ROOT / path).equals(made)


@pytest.mark.parametrize("path", ["sample_data/list.parquet", "engine/init/list.parquet"])
def test_every_domain_is_reserved(path: str) -> None:
    for address in pq.read_table(ROOT / path)["email"].to_pylist():
        try:
            domain = parse_mailbox(address).domain
        except AddressError:
            continue
        assert domain.endswith((".example", ".test")) or domain in ("example.com", "example.org", "example.net")


def test_the_first_settings_are_valid_and_local() -> None:
    settings = parse_settings((ROOT / "engine" / "init" / "campaign.toml").read_bytes())
    assert settings.delivery.relay.startswith(("sink:", "smtp://127.0.0.1:"))  # nothing leaves this machine
    assert settings.delivery.tls == "off"
    for name in (settings.message.text, settings.message.html):
        assert (ROOT / "engine" / "init" / str(name)).exists()
