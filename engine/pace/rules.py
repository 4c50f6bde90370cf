"""What a reply means: whose affair it is, what became of the attempt, what to do next. Pure.

Rules are data (`replies.toml`, then the campaign's file, see `rulefile`); each carries replies it must and must not
match. Scope is decided first, class second, for the dear mistake is the scope: of 510 labelled 5xx records of a
public corpus 41 % were not about the recipient. What holds whatever a rule says:

- before RCPT nothing is about the recipient or the message: the row was not attempted (LOST), nobody is suppressed;
- only scope RECIPIENT with a class that says "nobody is there" suppresses, and only on a permanent code;
- the basic code decides between now and never unless the rule says otherwise (Gmail sends `421 5.7.32`); the text
  decides the scope;
- `judge` never fails and never calls a refusal accepted.

RFC 5321 §4.2 (codes by their first digit), §4.5.3.1.10 (552 on RCPT), RFC 3463, 5248, 7504, 7505, and what providers
publish (each rule names its source).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from engine.config import Duration, decode_custom
from engine.errors import EngineError, Exit
from engine.pace.judgement import MANNERS, NOTHING, Action, Class_, Judgement, Manner, Outcome, Scope
from formats.reply import Reply
from formats.sendlog import Reason, Verdict

# The stages of a session; other words people use for them are understood too. "report" is no session: a delivery
# report quotes a reply and seldom says at which command it was given.
STAGES = ("connect", "greeting", "ehlo", "starttls", "auth", "idle", "mail", "rcpt", "data", "dot", "quit", "report")
_ALIASES = {
    "banner": "greeting", "helo": "ehlo", "lhlo": "ehlo", "tls": "starttls", "handshake": "starttls",
    "login": "auth", "rset": "idle", "noop": "idle", "mail_from": "mail", "mailfrom": "mail", "rcpt_to": "rcpt",
    "rcptto": "rcpt", "recipient": "rcpt", "bdat": "dot", "content": "dot", "eom": "dot", "end": "dot",
    "end_of_data": "dot", "final": "dot", "dsn": "report", "diagnostic": "report",
}  # fmt: skip
_BEFORE_RCPT = frozenset({"connect", "greeting", "ehlo", "starttls", "auth", "idle", "quit"})
_ABOUT_RECIPIENT = frozenset({"rcpt", "data", "dot", "report"})


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule, compiled. Unset conditions match everything."""

    name: str
    class_: Class_
    providers: frozenset[str] = frozenset()
    stages: frozenset[str] = frozenset()
    codes: frozenset[int] = frozenset()
    enhanced: re.Pattern[str] | None = None
    text: re.Pattern[str] | None = None
    unless: re.Pattern[str] | None = None
    scope: Scope
    outcome: Outcome
    reason: Reason
    suppress: bool
    wait_s: float | None
    action: Action
    why: str = ""

    def fits(self, stage: str, enhanced: str, text: str) -> bool:
        """Whether the rule holds for a reply whose code it was found by."""
        if self.stages and stage not in self.stages:
            return False
        if self.enhanced is not None and not self.enhanced.fullmatch(enhanced):
            return False
        if self.text is not None and not self.text.search(text):
            return False
        return self.unless is None or not self.unless.search(text)


_ENHANCED = re.compile(r"(?<![\d.])([245]\.\d{1,3}\.\d{1,3})(?![\d.]*\d)")
_ADDRESS = re.compile(r"<?[^\s<>@\"()\[\],;:]{1,64}@[\w.-]{3,255}>?")
_IP = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\d)|(?<![\w:])(?:[0-9a-f]{1,4}:){3,}[0-9a-f:]+", re.I)
# Queue ids and session tokens: twelve or more letters and digits, mixed. `RL000001`, `OFR004_104` are shorter.
_TOKEN = re.compile(r"\b(?=\w*\d)(?=\w*[a-z])\w{12,}(?:-\w*\d\w*|\.\d+)*", re.I)
_SPACE = re.compile(r"\s+")
_HINT = re.compile(
    r"(?:\b(?:in|after|for|wait|within|until|delay(?:ed)?(?: of)?)\s+|\()"
    r"(?:about |approximately |at least |another )?"
    r"(?:(\d{1,2}):(\d\d):(\d\d)|(\d{1,6})\s*(s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?))\b",
    re.I,
)
_LONGEST_HINT_S = 86_400.0
_TEXT_LIMIT = 1_000
_REMEMBERED = 8_192


def normalise(text: str) -> str:
    """The text that rules see: lower case, single spaces, placeholders for addresses, IPs and queue ids, and no
    further lines' codes."""
    text = _SPACE.sub(" ", text[:_TEXT_LIMIT]).strip().lower()
    head = _ENHANCED.match(text)
    if head is not None:
        # Multi-line replies repeat the enhanced code at each line's start, in the middle of sentences once joined.
        code = head.group(1)
        text = code + text[len(code) :].replace(f" {code} ", " ").replace(f" {code}-", " ")
    return _TOKEN.sub("id", _IP.sub("ip", _ADDRESS.sub("<address>", text)))


def hint_s(text: str) -> float | None:
    """The wait that the text asks for ("try again in 300 seconds", "in 00:04:58"), at most a day."""
    found = _HINT.search(text[:_TEXT_LIMIT])
    if found is None:
        return None
    if found[1] is not None:
        seconds = int(found[1]) * 3600.0 + int(found[2]) * 60 + int(found[3])
    else:
        seconds = int(found[4]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[found[5][0].lower()]
    return min(max(seconds, 1.0), _LONGEST_HINT_S)


def stage_named(stage: str) -> str:
    """The stage that a word means; "report" for a word nobody knows, where every rule may hold."""
    word = stage.lower().replace("-", "_")
    word = _ALIASES.get(word, word)
    return word if word in STAGES else "report"


class RuleBook:
    """All rules in force, the campaign's before the shipped ones, a provider's before the general ones."""

    def __init__(self, rules: Iterable[Rule], fingerprints: Iterable[tuple[str, re.Pattern[str]]] = ()) -> None:
        self.rules = tuple(rules)
        self._fingerprints = tuple(fingerprints)
        self._by_provider: dict[str | None, dict[int, list[Rule]]] = {}
        self._seen: dict[tuple[str, int, str, str | None], Judgement] = {}
        self._named = {provider for rule in self.rules for provider in rule.providers}

    def judge(self, stage: str, reply: Reply, provider: str | None = None) -> Judgement:
        """What `reply`, given to the command of `stage`, means. Never fails; a repeated reply costs one look-up."""
        if provider is not None and provider not in self._named:
            provider = ""  # all providers without rules of their own share one table
        key = (stage, reply.code, reply.text, provider)
        found = self._seen.get(key)
        if found is not None:
            return found
        text = normalise(reply.text)
        shorter = (stage, reply.code, text, provider)
        found = self._seen.get(shorter)
        if found is None:
            found = self._decide(stage_named(stage), reply.code, text, provider)
        if len(self._seen) >= _REMEMBERED:
            self._seen.clear()
        self._seen[key] = self._seen[shorter] = found
        return found

    def _decide(self, stage: str, code: int, text: str, provider: str | None) -> Judgement:
        if not 400 <= code < 600:
            return _no_refusal(stage, code)
        if not provider:
            # Behind a relay, or in a delivery report, the words themselves say whose they are.
            provider = next((name for name, mark in self._fingerprints if mark.search(text)), provider)
        for rule in self._rules_for(provider, code):
            if rule.fits(stage, _enhanced_in(text), text):
                return _judgement(rule, stage, code, text)
        return _judgement(UNCLEAR, stage, code, text)

    def _rules_for(self, provider: str | None, code: int) -> list[Rule]:
        table = self._by_provider.setdefault(provider, {})
        if code not in table:
            table[code] = [
                rule
                for rule in self.rules
                if (not rule.codes or code in rule.codes) and (not rule.providers or provider in rule.providers)
            ]
        return table[code]


def _enhanced_in(text: str) -> str:
    found = _ENHANCED.search(text)
    return found.group(1) if found else ""


UNCLEAR = Rule(
    name="unclear",
    class_=Class_.UNCLEAR,
    scope=Scope.MESSAGE,
    outcome=Outcome.BY_CODE,
    reason=Reason.POLICY,
    suppress=False,
    wait_s=None,
    action=Action(alarm=True, after=20, within_s=600.0),
    why="no rule knew it",
)


def _no_refusal(stage: str, code: int) -> Judgement:
    """Something that is neither 4xx nor 5xx: no reply at all (0), or a success where one was owed otherwise."""
    action = Action(fewer_connections=True, alarm=True, after=5, within_s=600.0)
    if stage == "dot":
        # RFC 5321 §4.2: any 2xx is success. Gibberish in place of the last reply says nothing: in doubt, not again.
        verdict = Verdict.ACCEPTED if 200 <= code < 300 else Verdict.IN_DOUBT
        return Judgement(verdict, Reason.NONE, Scope.MESSAGE, Class_.PROTOCOL, "no-refusal", action=NOTHING)
    return Judgement(Verdict.LOST, Reason.POLICY, Scope.CONNECTION, Class_.PROTOCOL, "no-reply", action=action)


def _judgement(rule: Rule, stage: str, code: int, text: str) -> Judgement:
    permanent = code >= 500
    scope, suppress = rule.scope, rule.suppress
    match rule.outcome:
        case Outcome.BY_CODE:
            verdict = Verdict.REJECTED if permanent else Verdict.DEFERRED
        case Outcome.REJECTED:
            verdict = Verdict.REJECTED
        case Outcome.DEFERRED:
            verdict = Verdict.DEFERRED
        case Outcome.LOST:
            verdict = Verdict.DEFERRED if stage in ("dot", "report") else Verdict.LOST
    if stage in _BEFORE_RCPT:
        verdict = Verdict.LOST
        scope = Scope.SOURCE if scope in (Scope.RECIPIENT, Scope.MESSAGE) else scope
    elif stage == "mail" and scope is Scope.RECIPIENT:
        scope = Scope.SIGNING_DOMAIN
    suppress = (
        suppress
        and scope is Scope.RECIPIENT
        and permanent
        and verdict is Verdict.REJECTED
        and stage in _ABOUT_RECIPIENT
    )
    reason = rule.reason
    if verdict is Verdict.REJECTED and reason is Reason.RECIPIENT and scope is not Scope.RECIPIENT:
        reason = Reason.POLICY
    wait_s = None
    if verdict in (Verdict.DEFERRED, Verdict.LOST):
        wait_s = hint_s(text) or rule.wait_s
    return Judgement(verdict, reason, scope, rule.class_, rule.name, suppress, wait_s, rule.action)


class RuleError(EngineError):
    """{file}, rule {rule}: {problem}."""

    exit_code = Exit.SETTINGS
    hint = "Correct the rule; the guide `reply-rules.md` lists what a rule may say."


class RuleText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One [[rule]] as it is written."""

    name: str
    class_: Class_ = msgspec.field(name="class")
    provider: str | list[str] = []
    stage: str | list[str] = []
    code: int | str | list[int | str] = []
    enhanced: str | list[str] = []
    text: str | None = None
    unless: str | None = None
    scope: Scope | None = None
    verdict: Outcome | None = None
    suppress: bool | None = None
    wait: Duration | None = None
    pause: Duration | None = None
    connections: int | None = None
    fewer_connections: bool | None = None
    fewer_per_connection: bool | None = None
    slower: bool | None = None
    alarm: bool | None = None
    after: int | None = None
    within: Duration | None = None
    why: str = ""  # the reason and the source
    samples: list[str]
    not_: list[str] = msgspec.field(name="not", default=[])


class FingerprintText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One [[fingerprint]]: words by which a provider's replies are known where the provider is not."""

    provider: str
    text: str


class RuleFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of rules."""

    rule: list[RuleText] = []
    fingerprint: list[FingerprintText] = []


SHIPPED = Path(__file__).with_name("replies.toml")


def read_rules(path: Path) -> RuleFile:
    """One file as it is written; raises RuleError."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=RuleFile, dec_hook=decode_custom)
    except OSError as problem:
        raise RuleError(file=path.name, rule="-", problem=problem.strerror) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as problem:
        raise RuleError(file=path.name, rule="-", problem=problem) from None


def own_rules(folder: Path) -> list[Path]:
    """The campaign's own file, where it has one."""
    own = folder / "replies.toml"
    return [own] if own.exists() else []


def load_rules(*extra: Path) -> RuleBook:
    """The shipped rules with those of `extra` before them, the last file first; raises RuleError."""
    files = [*reversed(extra), SHIPPED]
    rules: list[Rule] = []
    names: set[str] = set()
    fingerprints: list[tuple[str, re.Pattern[str]]] = []
    for path in files:
        written = read_rules(path)
        compiled = [_compiled(text, path.name) for text in written.rule]
        for mark in written.fingerprint:
            try:
                fingerprints.append((mark.provider, re.compile(mark.text)))
            except re.error as problem:
                raise RuleError(file=path.name, rule=f"fingerprint of {mark.provider}", problem=problem) from None
        for rule in compiled:
            if rule.name in names:
                raise RuleError(file=path.name, rule=rule.name, problem="the name is taken by another rule")
            names.add(rule.name)
        # A provider's own words before general ones.
        rules += [rule for rule in compiled if rule.providers]
        rules += [rule for rule in compiled if not rule.providers]
    return RuleBook(rules, fingerprints)


def _compiled(text: RuleText, file: str) -> Rule:
    def wrong(problem: str) -> RuleError:
        return RuleError(file=file, rule=text.name, problem=problem)

    if not text.samples:
        raise wrong("it has no samples")
    stages = frozenset(_listed(text.stage))
    if unknown := sorted(stages - set(STAGES)):
        raise wrong(f"unknown stage {unknown[0]!r}; stages are {', '.join(STAGES)}")
    manner = MANNERS[text.class_]
    scope = text.scope or manner.scope
    if scope is Scope.RECIPIENT and stages & _BEFORE_RCPT:
        raise wrong("before RCPT nothing is about the recipient")
    suppress = manner.suppress if text.suppress is None else text.suppress
    if text.suppress and not manner.suppress:
        raise wrong(f"class {text.class_} never suppresses: only classes that say nobody is there do")
    own: dict[str, Any] = {
        "pause_s": text.pause.seconds if text.pause else None,
        "connections": text.connections,
        "fewer_connections": text.fewer_connections,
        "fewer_per_connection": text.fewer_per_connection,
        "slower": text.slower,
        "alarm": text.alarm,
        "after": text.after,
        "within_s": text.within.seconds if text.within else None,
    }
    given = {key: value for key, value in own.items() if value is not None}
    # A rule that acts says all of its action: a threshold inherited by accident would be a surprise.
    action = Action(**given) if given else manner.action
    if action.after > 1 and not action.within_s:
        raise wrong("`after` needs `within`")
    try:
        return Rule(
            name=text.name,
            class_=text.class_,
            providers=frozenset(_listed(text.provider)),
            stages=stages,
            codes=frozenset(code for part in _listed(text.code) for code in _codes(part)),
            enhanced=_enhanced_pattern(_listed(text.enhanced)),
            text=re.compile(text.text) if text.text else None,
            unless=re.compile(text.unless) if text.unless else None,
            scope=scope,
            outcome=text.verdict or manner.outcome,
            reason=manner.reason,
            suppress=suppress,
            wait_s=text.wait.seconds if text.wait else manner.wait_s,
            action=action,
            why=text.why,
        )
    except (re.error, ValueError) as problem:
        raise wrong(str(problem)) from None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _codes(part: int | str) -> Iterable[int]:
    """421, "421", "45x" or "5xx"."""
    pattern = str(part)
    if not re.fullmatch(r"[45](?:\d\d|\dx|xx)", pattern):
        raise ValueError(f"code {pattern!r} is none of 421, 45x, 5xx")
    low = int(pattern.replace("x", "0"))
    return range(low, low + 10 ** pattern.count("x"))


def _enhanced_pattern(parts: list[str]) -> re.Pattern[str] | None:
    """From "4.7.28", "x.7.28" (either class), "5.7.*"."""
    for part in parts:
        if not re.fullmatch(r"[45x]\.(?:\d{1,3}|\*)\.(?:\d{1,3}|\*)", part):
            raise ValueError(f"enhanced status {part!r} is none of 4.7.28, x.7.28, 5.7.*")
    pattern = "|".join(part.replace(".", r"\.").replace("x", "[45]").replace("*", r"\d+") for part in parts)
    return re.compile(pattern) if parts else None


__all__ = [
    "MANNERS", "NOTHING", "STAGES", "Action", "Class_", "Judgement", "Manner", "Outcome", "Rule", "RuleBook",
    "RuleError", "Scope", "hint_s", "load_rules", "normalise", "own_rules", "read_rules", "stage_named",
]  # fmt: skip
