"""Spellings that one provider takes for one mailbox, folded for dedup (`--fold-provider`).

Only what providers document: Gmail ignores dots and a +tag and is also googlemail.com; Microsoft's, Apple's,
Fastmail's and Proton's consumer domains take a +tag (Proton ignores dots, hyphens and underscores too). Suppression
never relies on it: an address is looked up as it stands.
"""

from __future__ import annotations

import polars as pl

_GMAIL = ("gmail.com", "googlemail.com")
_PROTON = ("proton.me", "protonmail.com", "pm.me")
_TAGGED = (
    "outlook.com", "hotmail.com", "live.com", "msn.com", "icloud.com", "me.com", "mac.com", "fastmail.com",
)  # fmt: skip


def folded(canonical: str, domain: str) -> pl.Expr:
    """The canonical address in column `canonical`, of the domain in column `domain`, as its provider sees it."""
    at = pl.col(domain)
    plain = pl.col(canonical).str.split_exact("@", 1).struct.field("field_0")
    untagged = plain.str.replace(r"\+.*$", "")
    return (
        pl.when(at.is_in(_GMAIL))
        .then(untagged.str.replace_all(".", "", literal=True) + "@gmail.com")
        .when(at.is_in(_PROTON))
        .then(untagged.str.replace_all(r"[._-]", "") + "@proton.me")
        .when(at.is_in(_TAGGED))
        .then(untagged + "@" + at)
        .otherwise(canonical)
    )
