"""Samples of what mail servers send back, written from the structure of their formats: one builder or text a format.

Recipients are in example domains; nothing here is copied from real mail.
"""

# ruff: noqa: E501 (notices are written as hosts write them)

from __future__ import annotations

RETURNED = """\
Return-Path: <b{token}@bounces.example.com>
Received: from out.example.com by mx.example.net; Mon, 2 Mar 2026 10:00:00 +0000
From: Weekly <news@example.com>
To: {to}
Subject: The weekly
Message-ID: <0123456789abcdef0123456789abcdef@example.com>
List-Unsubscribe: <https://example.com/u/none>

Dear reader,
"""


def report(
    *fields: str,
    to: str = "ann@example.org",
    text: str = "Your message could not be delivered.",
    mta: str = "dns; relay.example.net",
    returned: str | None = None,
    headers: str = "",
    status_type: str = "message/delivery-status",
) -> bytes:
    """A multipart/report with these recipient blocks."""
    blocks = "\n\n".join(fields)
    body = RETURNED.format(to=to, token="") if returned is None else returned
    return f"""\
Return-Path: <>
From: Mail Delivery System <MAILER-DAEMON@relay.example.net>
To: bounces@example.com
Subject: Undelivered Mail Returned to Sender
MIME-Version: 1.0
{headers}Content-Type: multipart/report; report-type=delivery-status; boundary="=_b1"

--=_b1
Content-Type: text/plain; charset=us-ascii

{text}

--=_b1
Content-Type: {status_type}

Reporting-MTA: {mta}
Arrival-Date: Mon, 2 Mar 2026 10:00:00 +0000

{blocks}

--=_b1
Content-Type: message/rfc822

{body}
--=_b1--
""".encode()


def plain(
    text: str,
    *,
    sender: str = "MAILER-DAEMON@relay.example.net",
    subject: str = "failure notice",
    headers: str = "Return-Path: <>\n",
    to: str = "bounces@example.com",
) -> bytes:
    """A message of text alone."""
    head = f"{headers}From: {sender}\nTo: {to}\nSubject: {subject}\nContent-Type: text/plain; charset=utf-8\n\n"
    return (head + text).encode()


TO = RETURNED.format(to="Ann <ann@example.org>", token="")

# name -> (text of the notice, recipients, hard)
NOTICES: dict[str, tuple[bytes, list[str], bool]] = {
    "qmail": (
        plain(
            "Hi. This is the qmail-send program at relay.example.net.\n"
            "I'm afraid I wasn't able to deliver your message to the following addresses.\n"
            "This is a permanent error; I've given up. Sorry it didn't work out.\n\n"
            "<ann@example.org>:\n192.0.2.7 does not like recipient.\n"
            "Remote host said: 550 5.1.1 no such mailbox\nGiving up on 192.0.2.7.\n\n"
            "--- Below this line is a copy of the message.\n\n" + TO
        ),
        ["ann@example.org"],
        True,
    ),
    "qmail, no such host": (
        plain(
            "Hi. This is the qmail-send program at relay.example.net.\n"
            "I'm afraid I wasn't able to deliver your message to the following addresses.\n\n"
            "<ann@example.invalid>:\nSorry, I couldn't find any host named example.invalid. (#5.1.2)\n\n"
            "--- Enclosed is a copy of the message.\n\n" + TO
        ),
        ["ann@example.invalid"],
        True,
    ),
    "Exim": (
        plain(
            "This message was created automatically by mail delivery software.\n\n"
            "A message that you sent could not be delivered to one or more of its\n"
            "recipients. This is a permanent error. The following address(es) failed:\n\n"
            "  ann@example.org\n    host mx.example.org [192.0.2.7]\n"
            "    SMTP error from remote mail server after RCPT TO:<ann@example.org>:\n"
            "    550 5.1.1 <ann@example.org>: Recipient address rejected: User unknown\n\n"
            "------ This is a copy of the message, including all the headers. ------\n\n" + TO,
            subject="Mail delivery failed: returning message to sender",
            headers="Return-Path: <>\nX-Failed-Recipients: ann@example.org\nAuto-Submitted: auto-replied\n",
        ),
        ["ann@example.org"],
        True,
    ),
    "Exim, sender refused": (
        plain(
            "This message was created automatically by mail delivery software.\n\n"
            "A message that you sent could not be delivered to one or more of its\n"
            "recipients. This is a permanent error. The following address(es) failed:\n\n"
            "  ann@example.org\n    host mx.example.org [192.0.2.7]\n"
            "    SMTP error from remote mail server after MAIL FROM:<news@example.com> SIZE=2048:\n"
            "    550 5.1.8 no such user\n\n"
            "------ This is a copy of the message, including all the headers. ------\n\n" + TO,
            headers="X-Failed-Recipients: ann@example.org\n",
        ),
        ["ann@example.org"],
        False,
    ),
    "Exim, two recipients": (
        plain(
            "A message that you sent could not be delivered to one or more of its recipients.\n"
            "The following address(es) failed:\n\n"
            "  ann@example.org\n    mailbox is full: retry timeout exceeded\n"
            "  ben@example.org\n    Unrouteable address\n\n"
            "------ This is a copy of the message, including all the headers. ------\n\n" + TO,
        ),
        ["ann@example.org", "ben@example.org"],
        False,
    ),
    "sendmail without fields": (
        plain(
            "The original message was received at Mon, 2 Mar 2026 10:00:00 GMT\nfrom out.example.com [192.0.2.1]\n\n"
            "   ----- The following addresses had permanent fatal errors -----\n<ann@example.org>\n"
            "    (reason: 550 5.1.1 User unknown)\n\n"
            "   ----- Transcript of session follows -----\n... while talking to mx.example.org.:\n"
            ">>> RCPT To:<ann@example.org>\n<<< 550 5.1.1 User unknown\n550 5.1.1 <ann@example.org>... User unknown\n\n"
            "   ----- Original message follows -----\n\n" + TO,
            subject="Returned mail: see transcript for details",
        ),
        ["ann@example.org"],
        True,
    ),
    "sendmail 5, a transcript alone": (
        plain(
            "   ----- Transcript of session follows -----\n"
            "550 example.invalid (smtp)... 550 Host unknown\n"
            "554 <ann@example.invalid>... 550 Host unknown (Authoritative answer from name server)\n"
            "While talking to mx.example.org:\n>>> RCPT To:<ben@example.org>\n<<< 550 <ben@example.org>... User unknown\n"
            "550 <ben@example.org>... User unknown\n\n   ----- Unsent message follows -----\n" + TO,
            subject="Returned mail: User unknown",
        ),
        ["ann@example.invalid", "ben@example.org"],
        True,
    ),
    "Courier": (
        plain(
            "This is a delivery status notification from relay.example.net,\nrunning the Courier mail server.\n\n"
            "                           UNDELIVERABLE MAIL\n\n"
            "Your message to the following recipients cannot be delivered:\n\n"
            "<ann@example.org>:\n    mx.example.org [192.0.2.7]:\n>>> RCPT TO:<ann@example.org>\n<<< 550 User unknown.\n\n"
            "---------------------------------------------------------------------------\n",
            subject="NOTICE: mail delivery status.",
        ),
        ["ann@example.org"],
        True,
    ),
    "Exchange 5.5": (
        plain(
            "Your message\n\n  To:      ann@example.org\n  Subject: The weekly\n  Sent:    Mon, 2 Mar 2026 10:00:00 -0000\n\n"
            "did not reach the following recipient(s):\n\nann@example.org on Mon, 2 Mar 2026 10:00:05 -0000\n"
            "    The recipient name is not recognized\n    The MTS-ID of the original message is: c=us;a= ;p=x;l=Y-1\n"
            "    MSEXCH:IMS:X:Y:Z 0 (000C05A6) Unknown Recipient\n",
            sender="System Administrator <postmaster@example.org>",
            subject="Undeliverable: The weekly",
        ),
        ["ann@example.org"],
        True,
    ),
    "Domino": (
        plain(
            "Your message\n\n  Subject: The weekly\n\nwas not delivered to:\n\n  ann@example.org\n\nbecause:\n\n"
            "  User ann (ann@example.org) not listed in Domino Directory\n",
            sender="Postmaster@example.org",
            subject="DELIVERY FAILURE: User ann (ann@example.org) not listed in Domino Directory",
        ),
        ["ann@example.org"],
        True,
    ),
    "Notes": (
        plain(
            "------- Failure Reasons  --------\n\nUser not listed in public Name & Address Book\nann@example.org\n\n\n"
            "------- Returned Message --------\n\n" + TO,
            sender="postmaster@example.org",
            subject="Undeliverable message",
        ),
        ["ann@example.org"],
        True,
    ),
    "InterScan": (
        plain(
            "Message from InterScan Messaging Security Suite at relay.example.net\n\n"
            "Unable to deliver message to the recipient.\n\n"
            "Sent <<< RCPT TO:<ann@example.org>\nReceived >>> 550 5.1.1 <ann@example.org>... user unknown\n\n"
            "The original message is attached.\n",
            subject="Mail could not be delivered",
        ),
        ["ann@example.org"],
        True,
    ),
    "MailMarshal": (
        plain(
            "Your message:\n   From:    news@example.com\n   Subject: The weekly\n"
            "Could not be delivered because of\n\n550 5.1.1 User unknown\n\n"
            "The following recipients were affected:\n    ann@example.org\n\nAdditional Information\n======================\n",
            subject="Undeliverable Mail",
        ),
        ["ann@example.org"],
        True,
    ),
    "James": (
        plain(
            "Hi. This is the James mail server at relay.example.net.\n"
            "I'm afraid I wasn't able to deliver your message to the following addresses.\n"
            "This is a permanent error; I've given up.\n\nError message below:\n"
            "550 - Requested action not taken: no such user here\n\nMessage details:\n  Subject: The weekly\n"
            "  MAIL FROM: news@example.com\n  RCPT TO: ann@example.org\n  From: Weekly <news@example.com>\n"
            "  To: ann@example.org\n  Size (in bytes): 1024\n",
            sender="postmaster@relay.example.net",
            subject="[BOUNCE]",
        ),
        ["ann@example.org"],
        True,
    ),
    "IMail": (
        plain(
            "Unknown user: ann@example.org\n\nOriginal message follows.\n\n" + TO,
            sender='"Postmaster" <postmaster@example.org>',
            subject="Undeliverable Mail",
        ),
        ["ann@example.org"],
        True,
    ),
    "IMail, full": (
        plain(
            "User mailbox exceeds allowed size: ann@example.org\n\nOriginal message follows.\n\n" + TO,
            sender='"Postmaster" <postmaster@example.org>',
            subject="Undeliverable Mail",
        ),
        ["ann@example.org"],
        False,
    ),
    "hMailServer": (
        plain(
            "Your message did not reach some or all of the intended recipients.\n\n   Sent: Mon, 2 Mar 2026 10:00:00 +0000\n"
            "   Subject: The weekly\n\nThe following recipient(s) could not be reached:\n\nann@example.org\n"
            "   Error Type: SMTP\n   Remote server (192.0.2.7) issued an error.\n   hMailServer sent: RCPT TO:<ann@example.org>\n"
            "   Remote server replied: 550 5.5.0 Requested action not taken: mailbox unavailable\n\nhMailServer\n",
            sender="mailer-daemon@relay.example.net",
            subject="Message undeliverable: The weekly",
        ),
        ["ann@example.org"],
        True,
    ),
    "GMX": (
        plain(
            "This message was created automatically by mail delivery software.\n\n"
            "A message that you sent could not be delivered to one or more of\nits recipients. This is a permanent error."
            ' The following address\nfailed:\n\n"ann@example.org":\nSMTP error from remote server after RCPT command:\n'
            "host: mx.example.org\n5.2.2 <ann@example.org>... Mailbox full\n\n"
            "--- The header of the original message is following. ---\n\n" + TO
        ),
        ["ann@example.org"],
        False,
    ),
    "X6": (
        plain(
            "We had trouble delivering your message. Full details follow:\n\nSubject: 'The weekly'\n\n1 error(s):\n\n"
            "SMTP Server <mx.example.org> rejected recipient <ann@example.org>\n"
            "  (Error following RCPT command). It responded as follows: [550 5.1.1 User Unknown]\n\n",
            subject="There was an error sending your mail",
            sender="mail-daemon@relay.example.net",
        ),
        ["ann@example.org"],
        True,
    ),
    "OpenSMTPD, two": (
        plain(
            "    Hi!\n\n    This is the MAILER-DAEMON, please DO NOT REPLY to this e-mail.\n\n"
            "    An error has occurred while attempting to deliver a message for\n    the following list of recipients:\n\n"
            "ann@example.org: 550 5.2.2 <ann@example.org>... Mailbox Full\nben@example.org: Envelope expired\n\n"
            "    Below is a copy of the original message:\n\n" + TO,
            subject="Delivery status notification: error",
        ),
        ["ann@example.org", "ben@example.org"],
        False,
    ),
    "Zoho": (
        plain(
            "This message was created automatically by mail delivery software.\n"
            "A message that you sent could not be delivered to one or more of its recipients. This is a permanent error.\n\n"
            "ann@example.org Invalid Address, ERROR_CODE :550, ERROR_CODE :5.1.1 <ann@example.org>... User Unknown\n\n"
            "Received:from out.example.com by mx.example.net\n"
        ),
        ["ann@example.org"],
        True,
    ),
    "a Japanese mobile operator": (
        plain(
            "以下のあて先へのメッセージは送信できませんでした。\n\nEach of the following recipients was rejected by a remote\n"
            "mail server.\n\n    Recipient: <ann@example.jp>\n    >>> RCPT TO:<ann@example.jp>\n"
            "    <<< 550 <ann@example.jp>: User unknown\n",
            sender="Postmaster@example.jp",
            subject="Mail System Error - Returned Mail",
        ),
        ["ann@example.jp"],
        True,
    ),
    "German words": (
        plain(
            "Die folgende Nachricht konnte nicht zugestellt werden.\n\nEmpfänger: ann@example.org\n"
            "Grund: 550 5.1.1 unknown user\n",
            subject="Unzustellbar: The weekly",
        ),
        ["ann@example.org"],
        True,
    ),
    "Russian words, then English": (
        plain(
            "Ваше письмо не может быть доставлено одному или нескольким получателям:\n\n  ann@example.org\n"
            "    SMTP error from remote mail server after RCPT TO:<ann@example.org>:\n"
            "    host mx.example.org [192.0.2.7]: 550 5.1.1 User Unknown\n\n**********************\n\n"
            "A message that you sent could not be delivered. The following address(es) failed:\n\n  ann@example.org\n"
            "    SMTP error from remote mail server after RCPT TO:<ann@example.org>:\n"
            "    host mx.example.org [192.0.2.7]: 550 5.1.1 User Unknown\n"
        ),
        ["ann@example.org"],
        True,
    ),
    "X.400 gateway": (
        plain(
            "Your message did not reach the following recipient(s):\n\n"
            "c=us;a= ;p=x;o=y;dda:SMTP=ann@example.org; on Mon, 2 Mar 2026 10:00:00 -0000\n"
            "    Unable to deliver the message due to a recipient problem: The recipient name is not recognized\n",
            sender="System Administrator <postmaster@example.org>",
            subject="Undeliverable: The weekly",
        ),
        ["ann@example.org"],
        True,
    ),
}

FAILED = "Final-Recipient: rfc822; ann@example.org\nAction: failed\nStatus: 5.1.1\nRemote-MTA: dns; mx.example.org\nDiagnostic-Code: smtp; 550 5.1.1 <ann@example.org>: User unknown"
FULL = "Final-Recipient: rfc822; ann@example.org\nAction: failed\nStatus: 5.2.2\nDiagnostic-Code: smtp; 552 5.2.2 Mailbox full"

# Holiday replies: subject, text. None has a header field that helps.
HOLIDAYS = [
    ("Out of Office: The weekly", "I am out of the office until 3 March with limited access to email."),
    ("Automatic reply: The weekly", "Thank you for your message. I'm on vacation."),
    ("Automatische Antwort: The weekly", "Ich bin bis zum 3.3. im Urlaub und habe keinen Zugriff auf meine E-Mails."),
    ("Abwesenheitsnotiz: The weekly", "Vielen Dank für Ihre Nachricht."),
    ("Réponse automatique : The weekly", "Je suis absent du bureau jusqu'au 3 mars."),
    ("Respuesta automática: The weekly", "Estoy de vacaciones hasta el 3 de marzo."),
    ("Risposta automatica: The weekly", "Sono in ferie fino al 3 marzo."),
    ("Resposta automática: The weekly", "Estou ausente até 3 de março."),
    ("Automatisch antwoord: The weekly", "Ik ben op vakantie tot 3 maart."),
    ("Autosvar: The weekly", "Jag är på semester."),
    ("Automatyczna odpowiedź: The weekly", "Jestem na urlopie do 3 marca."),
    ("Автоответ: The weekly", "Я в отпуске до 3 марта."),
    ("自動応答: The weekly", "休暇中のため、返信が遅れます。"),
    ("自动答复: The weekly", "我正在休假。"),
    ("자동 회신: The weekly", "휴가 중입니다."),
    ("Re: The weekly", "I am currently out of the office. For urgent matters write to ben@example.org."),
    ("Re: The weekly", "I no longer work with Example. Please write to ben@example.org instead."),
]
