"""Reply rules: every shipped rule has samples that hold, scope before class, nobody suppressed for a policy."""

from __future__ import annotations

import random
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pace.rulelint import lint
from engine.pace.rules import MANNERS, SHIPPED, Class_, RuleError, Scope, hint_s, load_rules, normalise, read_rules
from formats.reply import Reply
from formats.sendlog import Reason, Verdict

BOOK = load_rules()


def judge(stage: str, text: str, provider: str | None = None):  # type: ignore[no-untyped-def]
    return BOOK.judge(stage, Reply(int(text[:3]), text[4:]), provider)


def test_no_shipped_rule_is_dead_shadowed_or_too_greedy() -> None:
    assert lint() == []


def test_every_class_is_used_and_has_a_manner() -> None:
    assert set(MANNERS) == set(Class_)
    assert {rule.class_ for rule in BOOK.rules} == set(Class_) - {Class_.UNCLEAR}


def test_every_rule_of_a_provider_or_with_an_action_names_its_reason() -> None:
    written = read_rules(SHIPPED).rule
    without = [rule.name for rule in written if not rule.why and rule.pause and not rule.provider]
    assert without == []


# (stage, provider, reply, class): what servers say, by the public lists.
SAID = [
    ("rcpt", None, "450 4.7.1 Client host rejected: cannot find your reverse hostname, [192.0.2.1]", "reverse_dns"),
    ("greeting", "google", "421 4.7.0 IP not in whitelist for RCPT domain, closing connection.", "reputation"),
    ("mail", "google", "421 4.7.0 TLS required for RCPT domain, closing connection.", "tls_required"),
    ("auth", None, "530 5.7.0 Must issue a STARTTLS command first", "tls_required"),
    ("ehlo", "google", "523 5.7.10 SMTP protocol violation, no commands allowed to pipeline after STARTTLS", "policy"),
    ("data", "google", "502 5.5.1 Unrecognized command.", "protocol"),
    ("mail", "google", "503 5.5.1 EHLO/HELO first.", "protocol"),
    ("mail", "google", "555 5.5.2 Syntax error, goodbye.", "protocol"),
    ("rcpt", "google", "452 4.5.3 Your message has too many recipients.", "too_many_recipients"),
    ("rcpt", None, "452 4.5.3 Too many recipients", "too_many_recipients"),
    ("rcpt", "exchange_online", "452 4.5.3 Too many recipients (AS780090)", "too_many_recipients"),
    ("rcpt", "mimecast", "452 Too many recipients", "too_many_recipients"),
    ("rcpt", "exchange_online", "550 5.2.2 Mailbox full", "mailbox_full"),
    ("rcpt", "exchange_online", "554 5.2.2 mailbox full; STOREDRV.Deliver", "mailbox_full"),
    ("dot", "exchange_online", "550 5.2.3 RESOLVER.RST.RecipSizeLimit; message too large for this recipient", "size"),
    ("dot", "outlook_consumer", "550 5.3.4 Message size exceeds fixed limit", "size"),
    ("rcpt", "apple", "552 5.2.2 <someone@icloud.com>: user is over quota", "mailbox_full"),
    ("dot", "apple", "550 5.7.0 Blocked - see https://ipcheck.proofpoint.com/?ip=192.0.2.1", "blocklisted"),
    ("dot", "apple", "554 5.7.1 Blocked: http://www.spamhaus.org/query/dbl?domain=example.org", "content"),
    ("mail", "apple", "554 5.7.1 Rejected: https://www.spamhaus.org/sbl/query/SBL1", "blocklisted"),
    ("rcpt", "comcast", "550 5.1.1 Not our Customer", "unknown_user"),
    ("rcpt", "laposte", "571 5.7.1 Message refused", "policy"),
    ("mail", "mailru", "550 5.7.1 This message was not accepted due to domain owner DMARC policy", "authentication"),
    ("dot", "yahoo", "421 4.7.0 Message temporarily deferred - [TSS04]", "rate"),
    ("dot", None, "552 5.7.0 blocked: its content presents a potential security issue", "content"),
    ("rcpt", None, "251 User not local; will forward", "protocol"),
    ("rcpt", None, "551 5.7.1 User not local; please try <b@example.net>", "moved"),
    ("rcpt", None, "556 5.1.10 Recipient address has null MX", "bad_domain"),
    ("rcpt", None, "550 5.1.6 Recipient has moved, mailbox no longer available", "moved"),
    ("dot", "exchange_online", "550 5.7.136 RESOLVER.RST.Restricted; not authorized", "recipient_refuses"),
    ("rcpt", "tencent", "550 Domain may not exist or DNS check failed", "sender_refused"),
    ("dot", "netease", "554 DT:SPM 163 smtp11, spam", "content"),
    ("mail", "netease", "550 RP:ORQ daily limit", "rate"),
    ("rcpt", "godaddy", "550 5.1.1 IB504 hourly limit", "rate"),
    ("mail", None, "454 4.7.0 Temporary authentication failure: generic failure", "login"),
    ("report", None, "450 4.4.1 [internal] Connection timed out", "network"),
    ("dot", None, "450 4.2.0 try again", "server_busy"),
    ("data", None, "421 4.7.0 closing", "shutdown"),
    ("dot", None, "451 4.3.0 <data>: Temporary lookup failure", "server_busy"),
    ("greeting", None, "421 Service not available, closing transmission channel", "shutdown"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "provider", "reply", "class_"), SAID)
def test_replies_from_the_public_lists_are_read_right(
    stage: str, provider: str | None, reply: str, class_: str
) -> None:
    assert judge(stage, reply, provider).class_ == class_


# The dear mistakes.


def test_greeting_is_never_the_recipient() -> None:
    said = judge("greeting", "550 5.1.1 User unknown")
    assert (said.verdict, said.scope, said.suppress) == (Verdict.LOST, Scope.SOURCE, False)
    nowl = judge("greeting", "554 IP=192.0.2.1 - None/bad reputation. Ask your postmaster (NOWL)", "tonline")
    assert nowl.class_ is Class_.BLOCKLISTED
    assert nowl.action.pause_s >= 3600
    assert nowl.action.alarm


def test_unknown_user_after_the_dot_is_the_recipient() -> None:
    said = judge("dot", "554 delivery error: dd This user doesn't have a yahoo.com account (a@yahoo.com) [-5]", "yahoo")
    assert (said.verdict, said.reason, said.suppress) == (Verdict.REJECTED, Reason.RECIPIENT, True)


def test_552_mailbox_not_found_is_final_and_bare_552_on_rcpt_is_not() -> None:
    # Public report: `552 1 ... mailbox not found` was retried as temporary.
    assert judge("dot", "552 1 Requested mail action aborted, mailbox not found", "yahoo").verdict is Verdict.REJECTED
    assert judge("rcpt", "552 Requested mail action aborted").verdict is Verdict.DEFERRED


def test_throttles_under_a_permanent_code_are_deferred() -> None:
    for provider, text in [
        ("tencent", "550 Ip frequency limited [abc]. http://service.mail.qq.com/cgi-bin/help"),
        ("netease", "550 RP:ORQ daily limit"),
        ("godaddy", "550 5.7.1 IB510 hourly limit"),
        ("exchange_online", "550 5.7.508 Access denied, [192.0.2.1] has exceeded permitted limits within range"),
    ]:
        said = judge("mail", text, provider)
        assert (said.class_, said.verdict, said.scope) == (Class_.RATE, Verdict.DEFERRED, Scope.SOURCE), text
        assert said.action.pause_s > 0


def test_recipient_rate_under_a_permanent_code_waits_and_suppresses_nobody() -> None:
    said = judge("rcpt", "550 5.2.1 The user is receiving mail at a rate that prevents delivery", "google")
    assert (said.verdict, said.scope, said.suppress, said.wait_s) == (Verdict.DEFERRED, Scope.RECIPIENT, False, 3600.0)


def test_code_and_enhanced_status_that_disagree() -> None:
    # The basic code says when, the text says whose: Gmail's 421 5.7.32 is deferred, and no retry alone will cure it.
    said = judge("dot", "421 5.7.32 Your email has been rate limited because there is no DMARC alignment.", "google")
    assert (said.verdict, said.scope, said.class_) == (Verdict.DEFERRED, Scope.SIGNING_DOMAIN, Class_.AUTHENTICATION)
    assert said.action.alarm
    assert judge("rcpt", "450 5.1.1 user unknown").verdict is Verdict.DEFERRED
    assert not judge("rcpt", "450 5.1.1 user unknown").suppress
    assert judge("rcpt", "550 4.2.2 mailbox full").verdict is Verdict.REJECTED


def test_gmail_throttle_pauses_ten_minutes_and_goes_on_with_one_connection() -> None:
    said = judge("dot", "421 4.7.28 unusual rate of email originating from your IP address", "google")
    assert (said.scope, said.action.pause_s, said.action.connections) == (Scope.SOURCE, 600.0, 1)
    domain = judge("dot", "421 4.7.28 unusual rate of email originating from your DKIM domain [example.org]", "google")
    assert domain.scope is Scope.SIGNING_DOMAIN


def test_greylisting_waits_as_asked_and_slows_nobody() -> None:
    said = judge("rcpt", "451 4.7.1 Greylisting in action, please come back in 00:04:58")
    assert (said.class_, said.wait_s, said.scope) == (Class_.GREYLISTED, 298.0, Scope.MESSAGE)
    assert said.action.pause_s == 0


def test_too_many_connections_costs_the_row_no_attempt() -> None:
    said = judge("greeting", "421 4.7.0 mx.example.net Error: too many connections from 192.0.2.1")
    assert (said.verdict, said.action.fewer_connections) == (Verdict.LOST, True)


def test_421_in_reply_to_data_is_the_connections_affair() -> None:
    # Public report: 421 as the reply to DATA left the socket open and hid the code.
    said = judge("data", "421 4.7.0 closing")
    assert (said.class_, said.verdict, said.scope) == (Class_.SHUTDOWN, Verdict.LOST, Scope.CONNECTION)


def test_lists_of_addresses_and_of_links_are_told_apart() -> None:
    assert judge("dot", "554 5.7.1 blocked using zen.spamhaus.org").scope is Scope.SOURCE
    assert judge("dot", "554 5.7.1 contains a URL listed in multi.surbl.org").scope is Scope.MESSAGE


def test_relay_account_limits_concern_the_campaign() -> None:
    # Public report: SES 454 with several workers, mails lost.
    said = judge("dot", "454 Throttling failure: Maximum sending rate exceeded.")
    assert (said.class_, said.scope, said.verdict) == (Class_.QUOTA, Scope.CAMPAIGN, Verdict.DEFERRED)
    login = judge("auth", "535 5.7.8 Error: authentication failed")
    assert (login.class_, login.scope, login.verdict) == (Class_.LOGIN, Scope.CAMPAIGN, Verdict.LOST)


def test_providers_are_known_by_their_words_where_they_are_not_known() -> None:
    said = judge("report", "421 4.7.28 Gmail has detected an unusual rate of email from your IP address x.12 - gsmtp")
    assert said.rule == "google-rate"
    assert judge("dot", "550 5.2.1 The account is receiving mail at a rate - gsmtp", "our-relay.example").rule == (
        "google-recipient-rate"
    )


def test_no_policy_refusal_suppresses() -> None:
    for rule in read_rules(SHIPPED).rule:
        if MANNERS[rule.class_].reason is not Reason.RECIPIENT:
            for sample in rule.samples:
                stage, _, rest = sample.partition(" ")
                for provider in [None, *([rule.provider] if isinstance(rule.provider, str) else rule.provider)]:
                    assert not judge(stage, rest, provider).suppress or provider is None, sample


@settings(deadline=None, max_examples=300)
@given(
    stage=st.sampled_from(["", "greeting", "rcpt", "dot", "bdat", "EOM", "?", "mail", "quit", "report"]),
    code=st.integers(-5, 999),
    text=st.text(max_size=300),
    provider=st.sampled_from([None, "google", "", "nobody.example"]),
)
def test_judge_never_fails_and_never_turns_a_refusal_into_acceptance(
    stage: str, code: int, text: str, provider: str | None
) -> None:
    said = BOOK.judge(stage, Reply(code, text), provider)
    if said.verdict is Verdict.ACCEPTED:
        assert 200 <= code < 300
    if said.suppress:
        assert said.scope is Scope.RECIPIENT
        assert code >= 500
        assert said.verdict is Verdict.REJECTED
    if stage in ("greeting", "quit"):
        assert said.verdict is Verdict.LOST


def test_nonsense_in_place_of_the_last_reply_is_in_doubt() -> None:
    assert BOOK.judge("dot", Reply(0, "\x00\x01")).verdict is Verdict.IN_DOUBT
    assert BOOK.judge("dot", Reply(354, "go on")).verdict is Verdict.IN_DOUBT
    assert BOOK.judge("rcpt", Reply(0, "HTTP/1.1 400 Bad Request")).verdict is Verdict.LOST


def test_hostile_texts_are_judged_in_little_time() -> None:
    rng = random.Random(7)
    words = ["user", "not ", "exist", "a" * 500, "mailbox ", "<" * 300, "too many ", "5.1.1 ", "1.2.3.4 ", "@" * 200]
    for _ in range(200):
        text = "".join(rng.choice(words) for _ in range(400))
        BOOK.judge("rcpt", Reply(550, text))
    for character in string.punctuation + "a0 ":
        BOOK.judge("rcpt", Reply(550, character * 100_000))


def test_normalised_text_hides_what_differs_between_rows() -> None:
    a = normalise("5.1.1 <Ann@Example.org>: unknown  user 192.0.2.7 d2e1a72fcca58-7a1b2c3d4e5si123456b3a.78 - gsmtp")
    b = normalise("5.1.1 <bob@example.org>: unknown user 198.51.100.9 a1b2c3d4e5f67-41d4si998877b3b.12 - gsmtp")
    assert a == b == "5.1.1 <address>: unknown user ip id - gsmtp"


def test_hints_are_read_and_bounded() -> None:
    assert hint_s("try again in 300 seconds") == 300
    assert hint_s("Greylisted for 5 minutes") == 300
    assert hint_s("wait 1 hour") == 3600
    assert hint_s("retry after 99999 hours") == 86_400
    assert hint_s("in 0 seconds") == 1
    assert hint_s("error 550 in 3 places") is None


def test_campaign_rules_come_first_and_are_linted(tmp_path: Path) -> None:
    own = tmp_path / "replies.toml"
    own.write_text(
        '[[rule]]\nname = "our-relay-pause"\nclass = "rate"\ncode = 550\ntext = "our relay rests"\npause = "2m"\n'
        'samples = ["rcpt 550 5.1.1 our relay rests"]\n'
    )
    assert lint(own) == []
    said = load_rules(own).judge("rcpt", Reply(550, "5.1.1 our relay rests"))
    assert (said.rule, said.action.pause_s) == ("our-relay-pause", 120.0)


def test_shadowed_rule_is_found(tmp_path: Path) -> None:
    own = tmp_path / "replies.toml"
    own.write_text(
        '[[rule]]\nname = "wide"\nclass = "rate"\ncode = "4xx"\nsamples = ["rcpt 450 anything"]\n'
        '[[rule]]\nname = "narrow"\nclass = "rate"\ncode = 450\ntext = "slow"\nsamples = ["rcpt 450 slow"]\n'
    )
    assert any(finding.rule == "narrow" and "judged by wide" in finding.problem for finding in lint(own))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[rule]]\nname = "a"\nclass = "rate"\nsamples = []', "no samples"),
        ('[[rule]]\nname = "a"\nclass = "rate"\nsamples = ["rcpt 450 x"]\nkolour = 1', "kolour"),
        ('[[rule]]\nname = "a"\nclass = "rated"\nsamples = ["rcpt 450 x"]', "rated"),
        ('[[rule]]\nname = "a"\nclass = "rate"\ncode = 250\nsamples = ["rcpt 450 x"]', "250"),
        ('[[rule]]\nname = "a"\nclass = "rate"\nenhanced = "4.7"\nsamples = ["rcpt 450 x"]', "4.7"),
        ('[[rule]]\nname = "a"\nclass = "rate"\ntext = "("\nsamples = ["rcpt 450 x"]', "rule a"),
        ('[[rule]]\nname = "a"\nclass = "rate"\nsuppress = true\nsamples = ["rcpt 450 x"]', "never suppresses"),
        ('[[rule]]\nname = "a"\nclass = "disabled"\nstage = "greeting"\nsamples = ["rcpt 450 x"]', "before RCPT"),
        ('[[rule]]\nname = "google-rate"\nclass = "rate"\nsamples = ["rcpt 450 x"]', "taken"),
        ("[[rule]\n", "replies.toml"),
    ],
)
def test_mistakes_in_a_rule_file_are_named(tmp_path: Path, text: str, says: str) -> None:
    own = tmp_path / "replies.toml"
    own.write_text(text)
    with pytest.raises(RuleError, match=says.replace(".", r"\.")):
        load_rules(own)
