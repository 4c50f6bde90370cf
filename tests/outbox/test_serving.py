"""What an application writes is sent, once, and the table says what became of it."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from engine.control.outbox import Mail, OutboxRefused, Report, State
from engine.outbox import connect, enqueue, insert

if TYPE_CHECKING:
    from tests.outbox.conftest import PostOffice

MANY = 60


def welcome(name: str, **more: object) -> Mail:
    address = more.pop("address", f"{name}@example.com")
    return Mail(
        address=str(address),
        template="welcome",
        fields={"name": name, "confirm_url": f"https://example.com/c?n={name}"},
        **more,  # type: ignore[arg-type]  # whatever a test says of the rest
    )


def mails_in(folder: Path) -> dict[str, EmailMessage]:
    """What the sink kept, by recipient."""
    found = {}
    for path in folder.glob("*.eml"):
        mail = message_from_bytes(path.read_bytes(), policy=policy.default)
        assert isinstance(mail, EmailMessage)
        found[str(mail["To"])] = mail
    return found


@pytest.mark.slow
def test_a_sign_up_mail_written_by_plain_sql_is_sent(office: PostOffice) -> None:
    server = office.serve()
    application = sqlite3.connect(office.home / "outbox.sqlite")
    with application:
        application.execute(
            "INSERT INTO outbox (priority, address, template, fields) VALUES (1, ?, 'welcome', ?)",
            ("ann@example.com", '{"name": "Änn", "confirm_url": "https://example.com/c"}'),
        )
    application.close()
    office.until(accepted=1)
    mail = mails_in(office.home.parent / "mails")["ann@example.com"]
    assert mail["Subject"] == "Welcome, Änn"
    assert "https://example.com/c" in mail.get_content()
    assert office.row(1).code == 250
    assert office.stop(server) == 0


def test_a_mail_is_part_of_the_applications_transaction(office: PostOffice) -> None:
    application = sqlite3.connect(office.home / "outbox.sqlite")
    insert(application, welcome("ann"))
    application.rollback()
    insert(application, welcome("bob"))
    application.commit()
    application.close()
    assert [row.address for row in office.box.rows(None, 0, 9)] == ["bob@example.com"]


def test_equal_keys_of_two_writers_are_one_mail(office: PostOffice) -> None:
    added: list[bool] = []

    def write() -> None:
        box = connect(office.home)
        added.extend(one.is_new for one in box.enqueue([welcome("ann", idempotency_key="sign-up-7")]))
        box.close()

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(added) == [False, False, False, True]
    assert office.states() == {"queued": 1}


def test_asyncio_applications_enqueue_too(office: PostOffice) -> None:
    (one,) = asyncio.run(enqueue(office.home, welcome("ann", priority=2)))
    assert one.is_new
    assert office.row(one.id).priority == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "mail",
    [Mail(address="a@example.com"), Mail(address="a@example.com", subject="x"), Mail(address=" ", template="w")],
)
def test_half_a_mail_is_refused_when_it_is_written(office: PostOffice, mail: Mail) -> None:
    with pytest.raises(OutboxRefused):
        office.box.enqueue([mail])
    with pytest.raises(OutboxRefused):
        office.box.enqueue([welcome("ann", priority=7)])
    assert not office.states()


@pytest.mark.slow
def test_what_can_never_be_sent_says_why(office: PostOffice) -> None:
    (office.home / "templates" / "broken.toml").write_text("subject = 'x'\nfont = 'big'\n")
    office.box.enqueue(
        [
            welcome("ann", address="no address"),
            Mail(address="b@example.com", template="wellcome"),
            Mail(address="c@example.com", template="welcome", fields={"nmae": "C"}),
            Mail(address="d@example.com", template="../keys/secret"),
            Mail(address="e@example.com", template="broken"),
            Mail(address="f@example.com", subject="s", text="t", attachments=("../keys/secret.keys",)),
            Mail(address="g@example.com", subject="s", text="t", headers={"Bcc": "x@example.com"}),
            welcome("h", expires_at_us=1),
            welcome("i", not_before_us=office.box.now_us() + 3_600_000_000),
            welcome("j"),
        ]
    )
    office.serve()
    office.until(accepted=1, queued=1, invalid__address=1, invalid__render=6, unsent__expired=1)
    assert "there is no template 'wellcome'; there is broken, welcome" in (office.row(2).reply or "")
    assert "the mail has no field 'name'; did you mean 'nmae'" in (office.row(3).reply or "")
    assert "font" in (office.row(5).reply or "")
    assert "below the folder attachments/" in (office.row(6).reply or "")
    assert office.received().recipients == 1


def test_what_the_application_composed_is_sent_as_it_is(office: PostOffice) -> None:
    (office.home / "attachments" / "invoice.txt").write_text("12 EUR")
    text = "Hello {{ you }}, 1 < 2 & 3\n.dot"
    html = "<p>Hello {{ you }} &amp; <b>all</b></p>"
    office.box.enqueue(
        [
            Mail(
                address="ann@example.com",
                subject="Your {{ invoice }} & more",
                text=text,
                html=html,
                headers={"X-Order": "77"},
                attachments=("invoice.txt",),
            )
        ]
    )
    office.serve()
    office.until(accepted=1)
    mail = mails_in(office.home.parent / "mails")["ann@example.com"]
    assert mail["Subject"] == "Your {{ invoice }} & more"
    assert mail["X-Order"] == "77"
    body, page = mail.get_body(("plain",)), mail.get_body(("html",))
    assert body is not None
    assert page is not None
    assert body.get_content().splitlines() == text.splitlines()
    assert page.get_content().strip() == html
    assert [part.get_filename() for part in mail.iter_attachments()] == ["invoice.txt"]


@pytest.mark.slow
def test_priority_one_goes_first_and_the_lowest_is_not_starved(office: PostOffice) -> None:
    office.set("connections", "1")
    office.box.enqueue([welcome(f"n{n}", priority=3) for n in range(30)])
    office.box.enqueue([welcome(f"s{n}", priority=1) for n in range(30)])
    office.serve()
    office.until(accepted=60)
    assert office.sink.record is not None
    order = [line.split("\t")[3][0] for line in office.sink.record.read_text().splitlines()[1:]]
    first = order[:30]
    assert 24 <= first.count("s") < 30, order
    assert first.count("n") >= 2, order


@pytest.mark.slow
def test_deferred_mails_wait_in_the_table_and_go_later(office: PostOffice) -> None:
    office.box.enqueue([welcome(f"w{n}", address=f"451-once+{n}@example.com") for n in range(3)])
    office.box.enqueue([welcome("x", address="550@example.com"), welcome("y", address="drop-dot@example.com")])
    office.serve()
    office.until(accepted=3, in_doubt=1)
    assert office.row(1).attempts == 2
    assert office.row(4).state == "bounced"
    assert "connection" in (office.row(5).reply or "").lower() or office.row(5).reply


@pytest.mark.slow
def test_a_permanent_refusal_of_the_mailbox_suppresses_it(office: PostOffice) -> None:
    office.serve()
    office.box.enqueue([welcome("x", address="550@example.com")])
    office.until(bounced__recipient=1)
    office.box.enqueue([welcome("x", address="550@example.com", priority=1)])
    office.until(suppressed=1)


def test_an_operator_resends_doubt_and_a_late_word_of_the_first_attempt_settles_it(office: PostOffice) -> None:
    box = office.box
    box.enqueue([welcome("ann")])
    (mine,) = box.claim("gone", "first", 1, 5) or box.claim("gone", "first", 3, 5)
    assert box.intend([(mine.id, "first")]) == {mine.id}
    box.report([Report(id=1, token="first", state=State.IN_DOUBT)])
    assert box.resend([1]) == 1
    assert office.row(1).state == "queued"
    box.report([Report(id=1, token="first", state=State.ACCEPTED, attempts=1)])
    assert office.row(1).state == "accepted"
    assert box.claim("next", "second", 3, 5) == []


def test_the_command_line_enqueues_shows_and_cancels(office: PostOffice) -> None:
    lines = b"\n".join(
        msgspec.json.encode({"address": f"p{n}@example.com", "template": "welcome", "idempotency_key": str(n % 5)})
        for n in range(8)
    )
    where = ("--campaign", str(office.home))
    assert "5 added, 3 were there already" in office.run("enqueue", *where, stdin=lines.decode())
    assert "line 1" in office.run("enqueue", *where, stdin='{"adress": "x"}', code=2)
    office.run(
        "enqueue", *where, "--to", "x@example.com", "--template", "welcome", "--not-before", "2030-01-01", code=2
    )
    office.run("outbox", "cancel", *where, "--rows", "1-2")
    told = msgspec.json.decode(office.run("outbox", "status", *where, "--json"))
    assert told["rows"] == 5
    assert {(count[1], count[2], count[3]) for count in told["counts"]} == {
        ("queued", "", 3),
        ("unsent", "cancelled", 2),
    }
    assert "unsent/cancelled" in office.run("outbox", "show", *where)


@pytest.mark.slow
def test_pause_holds_new_attempts_until_resume(office: PostOffice) -> None:
    office.box.set_knob("paused", "a holiday")
    office.serve()
    deadline = time.monotonic() + 10
    while not office.box.servers():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    office.box.enqueue([welcome("ann")])
    time.sleep(0.7)
    assert office.states() == {"queued": 1}
    office.box.set_knob("paused", "")
    office.until(accepted=1)


@pytest.mark.slow
def test_stopping_in_order_leaves_nothing_behind(office: PostOffice) -> None:
    office.set("connections", "1")
    server = office.serve()
    office.box.enqueue([welcome(f"n{n}", address=f"slow-50ms+{n}@example.com") for n in range(MANY)])
    time.sleep(1.5)
    assert office.stop(server) == 0
    states = office.states()
    assert states["queued"] + states["accepted"] == MANY
    assert states["in_doubt"] == states["sending"] == 0
    office.serve()
    office.until(accepted=MANY)
    assert office.received().twice == ()
