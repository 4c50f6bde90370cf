"""How well and how fast bounces are read: the score on a labelled corpus, messages a second, damaged messages.

    python benchmarks/bounces.py CORPUS [--families] [--wrong] [--rate] [--mutations N] [--seed S]

CORPUS is a folder with `expected.jsonl`, one object a line: {"file": NAME, "expected": [{"recipient", "reason", "hard",
...}]}. A recipient counts as right where every expected address, and no other, was found (as reported or as the
original recipient). Hard or not is counted over all recipients except those with the reasons `filtered` and `suspend`,
on which labels of the same words differ.

--families gives the score of each family of files (the name up to its last hyphen) with the report rules that fire for
no other family taken away: what a mail server that nobody looked at would get.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from engine.bounce import classify as classifying
from engine.bounce.classify import Finding, classify, shipped_rules
from engine.pace.rules import RuleBook
from formats.feedback import Feedback, Kind, read_feedback
from formats.feedback.smtpwords import fold

NOT_COUNTED = frozenset({"filtered", "suspend"})


class Expected(msgspec.Struct):
    recipient: str
    reason: str
    hard: bool
    kind: str = "bounce"


class Sample(msgspec.Struct):
    file: str
    expected: list[Expected]


class Score(msgspec.Struct):
    files: int = 0
    right: int = 0
    hits: int = 0
    false_alarms: int = 0
    misses: int = 0
    right_rejections: int = 0

    @property
    def precision(self) -> float:
        return self.hits / max(1, self.hits + self.false_alarms)

    @property
    def recall(self) -> float:
        return self.hits / max(1, self.hits + self.misses)

    def line(self, name: str) -> str:
        return (
            f"{name:24} files {self.files:4}  recipients right {self.right / max(1, self.files):6.1%}   "
            f"hard: precision {self.precision:6.1%} recall {self.recall:6.1%} "
            f"(hit {self.hits}, false {self.false_alarms}, missed {self.misses}, rest {self.right_rejections})"
        )


def recipients_right(sample: Sample, feedback: Feedback) -> bool:
    wanted = {fold(one.recipient) for one in sample.expected}
    found = [{fold(one.address), fold(one.original)} for one in feedback.recipients]
    return len(found) == len(wanted) and all(any(one in names for names in found) for one in wanted)


def finding_of(expected: Expected, feedback: Feedback, findings: list[Finding]) -> Finding | None:
    wanted = fold(expected.recipient)
    for finding, recipient in zip(findings, feedback.recipients, strict=False):
        if wanted in (fold(recipient.address), fold(recipient.original)):
            return finding
    return findings[0] if len(findings) == 1 else None


def score(samples: list[Sample], folder: Path, score: Score, *, wrong: bool = False) -> dict[str, set[str]]:
    """Adds to `score`; the report rules that fired, by family."""
    rules = shipped_rules()
    fired: dict[str, set[str]] = defaultdict(set)
    for sample in samples:
        feedback = read_feedback((folder / sample.file).read_bytes())
        findings = classify(feedback, rules)
        score.files += 1
        is_right = recipients_right(sample, feedback)
        score.right += is_right
        if wrong and not is_right:
            print(f"  recipients  {sample.file}: expected {[one.recipient for one in sample.expected]}, "
                  f"found {[one.address for one in feedback.recipients]}")  # fmt: skip
        for one in sample.expected:
            finding = finding_of(one, feedback, findings)
            if finding is not None:
                fired[family(sample.file)].add(finding.rule)
            if one.reason in NOT_COUNTED:
                continue
            is_hard = finding is not None and finding.hard
            score.hits += is_hard and one.hard
            score.false_alarms += is_hard and not one.hard
            score.misses += not is_hard and one.hard
            score.right_rejections += not is_hard and not one.hard
            if wrong and is_hard != one.hard:
                told = f"{finding.rule} {finding.status} {finding.diagnostic[:90]}" if finding else "nothing"
                print(f"  {'false alarm' if is_hard else 'missed     '} {sample.file} ({one.reason}): {told}")
    return fired


def family(name: str) -> str:
    return name.rpartition("-")[0]


def families(samples: list[Sample], folder: Path) -> None:
    fired = score(samples, folder, Score())
    whole = classifying.report_words()
    total = Score()
    for name in sorted(fired):
        elsewhere = set().union(*(rules for other, rules in fired.items() if other != name))
        kept = RuleBook(rule for rule in whole.rules if rule.name in elsewhere)
        classifying.report_words = lambda kept=kept: kept
        alone = Score()
        mine = [sample for sample in samples if family(sample.file) == name]
        score(mine, folder, alone)
        score(mine, folder, total)
        print(alone.line(name))
    classifying.report_words = lambda: whole
    print(total.line("all, each left out"))


def rate(samples: list[Sample], folder: Path, seconds: float = 2.0) -> None:
    rules = shipped_rules()
    everything = [(folder / sample.file).read_bytes() for sample in samples]
    standard = [raw for raw in everything if len(raw) < 32_768 and b"message/delivery-status" in raw]
    large = standard[0].rstrip() + b"\n" + b"A" * 70 * 1024 * 10
    for name, messages in (("standard reports", standard), ("all of the corpus", everything), ("700 KB each", [large])):
        count, began = 0, time.process_time()
        while time.process_time() - began < seconds:
            for raw in messages:
                classify(read_feedback(raw), rules)
            count += len(messages)
        print(f"{name:24} {count / (time.process_time() - began):8.0f} a second per core, read and classified")


def mutated(raw: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """`raw` with one to six damages: flips, cuts, repeats, swapped pieces, pieces of another message."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 6)):
        if not data:
            break
        at = rng.randrange(len(data))
        length = min(len(data) - at, rng.choice((1, 1, 8, 80, 800)))
        match rng.randrange(8):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = data[at : at + length] * rng.randint(1, 5)
            case 3:
                data[at:at] = bytes(rng.randrange(256) for _ in range(length))
            case 4:
                other = rng.choice(others)
                start = rng.randrange(len(other))
                data[at:at] = other[start : start + length * 4]
            case 5:
                del data[at:]
            case 6:
                data[at : at + length] = (
                    rng.choice((b"\n", b"\r\n", b"\0", b"@", b"<", b":", b" ", b"=", b"--")) * length
                )
            case 7:
                lines = bytes(data).split(b"\n")
                rng.shuffle(lines)
                data = bytearray(b"\n".join(lines))
    return bytes(data)


def mutations(samples: list[Sample], folder: Path, count: int, seed: int) -> None:
    rng = random.Random(seed)
    rules = shipped_rules()
    originals = [(folder / sample.file).read_bytes() for sample in samples]
    slowest, kinds = (0.0, ""), defaultdict(int)
    began = time.monotonic()
    for number in range(count):
        place = rng.randrange(len(originals))
        raw = mutated(originals[place], rng, originals)
        start = time.perf_counter()
        try:
            feedback = read_feedback(raw)
            classify(feedback, rules)
        except Exception as problem:
            Path("failed.eml").write_bytes(raw)
            sys.exit(f"mutation {number} of {samples[place].file} (seed {seed}): {problem!r}; kept as failed.eml")
        kinds[feedback.kind] += 1
        slowest = max(slowest, (time.perf_counter() - start, samples[place].file))
    print(
        f"{count} mutated messages, no exception, {time.monotonic() - began:.0f} s; slowest {slowest[0] * 1000:.0f} ms"
    )
    print("  " + ", ".join(f"{kind} {kinds[kind]}" for kind in Kind if kinds[kind]))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("corpus", type=Path)
    arguments.add_argument("--families", action="store_true", help="also each family left out")
    arguments.add_argument("--wrong", action="store_true", help="name what was read wrong")
    arguments.add_argument("--rate", action="store_true", help="also messages a second")
    arguments.add_argument(
        "--mutations", type=int, default=0, metavar="N", help="also N damaged messages (100000 for the claim)"
    )
    arguments.add_argument("--seed", type=int, default=1)
    options = arguments.parse_args()
    lines = (options.corpus / "expected.jsonl").read_text().splitlines()
    samples = [msgspec.convert(json.loads(line), Sample) for line in lines if line.strip()]
    whole = Score()
    score(samples, options.corpus, whole, wrong=options.wrong)
    print(whole.line("all"))
    if options.families:
        families(samples, options.corpus)
    if options.rate:
        rate(samples, options.corpus)
    if options.mutations:
        mutations(samples, options.corpus, options.mutations, options.seed)


if __name__ == "__main__":
    main()
