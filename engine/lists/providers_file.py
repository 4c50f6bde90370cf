"""Domains' providers from a file: the answers that `engine resolve` keeps (`domains.jsonl`), or one JSON object."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.lists.source import ListUnreadable


class _Answer(msgspec.Struct, frozen=True):
    domain: str
    provider: str = ""


def read_providers(path: Path) -> dict[str, str]:
    """Domain to provider, of the domains whose provider is known; the last line about a domain holds."""
    raw = path.read_bytes()
    try:
        try:
            return msgspec.json.decode(raw, type=dict[str, str])
        except msgspec.MsgspecError:
            answer = msgspec.json.Decoder(_Answer)
            answers = [answer.decode(line) for line in raw.splitlines() if line.strip()]
    except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
        raise ListUnreadable(
            file=path,
            problem=problem,
            next="Give the domains.jsonl that `engine resolve` wrote, or {domain: provider}.",
        ) from None
    return {one.domain: one.provider for one in answers if one.provider}
