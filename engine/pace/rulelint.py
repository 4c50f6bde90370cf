"""Are the rules what they say? Runs every sample through the whole book: no rule is dead, shadowed or too greedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine.pace.rules import SHIPPED, RuleText, load_rules, read_rules, stage_named
from formats.reply import Reply

_SAMPLE = re.compile(r"(?P<stage>[a-z]+) (?P<code>\d{3})(?:[ -](?P<text>.*))?\Z", re.S)


class Finding(msgspec.Struct, frozen=True):
    """One thing wrong with a file of rules."""

    rule: str
    problem: str

    def __str__(self) -> str:
        return f"rule {self.rule}: {self.problem}"


def parse_sample(sample: str) -> tuple[str, Reply]:
    """From "STAGE CODE TEXT"; raises ValueError."""
    found = _SAMPLE.match(sample)
    if found is None:
        raise ValueError(f'a sample is "STAGE CODE TEXT", not {sample!r}')
    if stage_named(found["stage"]) != found["stage"]:
        raise ValueError(f"unknown stage in sample {sample!r}")
    return found["stage"], Reply(int(found["code"]), found["text"] or "")


def lint(*extra: Path) -> list[Finding]:
    """What is wrong with the shipped rules and those of `extra` together; raises RuleError where one cannot be read."""
    book = load_rules(*extra)
    findings: list[Finding] = []
    for path in (*extra, SHIPPED):
        for rule in read_rules(path).rule:
            for provider in _providers(rule):
                for sample, should_match in _samples(rule):
                    try:
                        stage, reply = parse_sample(sample)
                    except ValueError as problem:
                        findings.append(Finding(rule.name, str(problem)))
                        continue
                    got = book.judge(stage, reply, provider).rule
                    if should_match and got != rule.name:
                        at = f" at {provider}" if provider else ""
                        findings.append(Finding(rule.name, f"its sample {sample!r}{at} is judged by {got}"))
                    elif not should_match and got == rule.name:
                        findings.append(Finding(rule.name, f"it matches {sample!r}, which it must not"))
    return findings


def _providers(rule: RuleText) -> list[str | None]:
    if isinstance(rule.provider, str):
        return [rule.provider]
    # A general rule must hold where the provider is not known and where it has no rules of its own.
    return list(rule.provider) or [None, "example.org"]


def _samples(rule: RuleText) -> Iterator[tuple[str, bool]]:
    yield from ((sample, True) for sample in rule.samples)
    yield from ((sample, False) for sample in rule.not_)
