"""Dialogue scripts: `tests/dialogues/*.txt`, read as documentation and played against the dialogue or over a socket.

# A comment.                            The first ones say what the script shows.
offer: PIPELINING SIZE=1000             what EHLO offered (default: nothing)
depth: 4                                settings of the manner: depth, ahead, pipelining, chunking
proven: yes                             a BDAT was accepted at this host before
send: 1 ann@a.test                      hand in message 1; its content is "message 1" CRLF, or what follows:
send: 2 bob@b.test content=.dot
close                                   finish: QUIT when all is answered
C: RCPT TO:<ann@a.test>                 exactly these bytes are written next (CRLF added)
S: 250 2.1.5 ok                         these bytes are received (CRLF added); consecutive lines come in one read
=> accepted 1: 250 2.0.0 queued         an event, in this order, after the S lines before it
=> refused 1 at rcpt: 550 5.1.1 no
=> lost 2 at mail: connection lost
=> lost 2 at mail: connection lost (421 bye)
=> in doubt 3: connection lost
hang up                                 the connection is gone
no reply in time                        the patience ran out
over                                    the dialogue asks for the connection to be closed
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.smtp.dialogue import Accepted, Event, InDoubt, Lost, Manner, Offer, Outgoing, Refused

FOLDER = Path(__file__).parents[1] / "dialogues"
RETURN_PATH = "b@s.test"


class Step(msgspec.Struct, frozen=True):
    """One line, or consecutive S lines. `kind`: send, close, C, S, event, hang up, no reply in time, over."""

    kind: str
    text: str = ""
    number: int = 0


class Script(msgspec.Struct, frozen=True):
    name: str
    offer: tuple[str, ...]
    manner: Manner
    proven: bool
    steps: tuple[Step, ...]

    @property
    def extensions(self) -> dict[str, str]:
        pairs = (word.lower().partition("=") for word in self.offer)
        return {name: value.upper() for name, _, value in pairs}

    @property
    def parsed_offer(self) -> Offer:
        return Offer.read(self.extensions)


def read_script(path: Path) -> Script:
    offer: tuple[str, ...] = ()
    settings: dict[str, object] = {}
    proven = False
    steps: list[Step] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        head, _, rest = line.partition(": " if line[:2] not in ("=>",) else " ")
        rest = rest.rstrip()
        match head:
            case "offer":
                offer = tuple(rest.split())
            case "depth":
                settings["depth"] = int(rest)
            case "ahead" | "pipelining" | "chunking":
                settings[head] = rest == "yes"
            case "proven":
                proven = rest == "yes"
            case "=>":
                steps.append(Step("event", rest, number))
            case "S" if steps and steps[-1].kind == "S":
                steps[-1] = Step("S", steps[-1].text + rest + "\r\n", steps[-1].number)
            case "S":
                steps.append(Step("S", rest + "\r\n", number))
            case "C" | "send":
                steps.append(Step(head, rest, number))
            case "C:":
                steps.append(Step("C", "", number))
            case "close" | "hang up" | "no reply in time" | "over":
                steps.append(Step(head, "", number))
            case _:
                raise ValueError(f"{path.name}:{number}: {line!r}")
    return Script(path.stem, offer, Manner(**settings), proven, tuple(steps))  # type: ignore[arg-type]


def scripts() -> list[Script]:
    return [read_script(path) for path in sorted(FOLDER.glob("*.txt"))]


def message(step: Step) -> Outgoing:
    ticket, recipient, *options = step.text.split(" ", 2)
    content = f"message {ticket}"
    for option in options:
        content = option.removeprefix("content=")
    raw = content.encode().replace(b"|", b"\r\n")
    return Outgoing(int(ticket), RETURN_PATH, recipient, raw if raw.endswith(b"\r\n") else raw + b"\r\n")


def spell(event: Event) -> str:
    """The event as a script writes it."""
    match event:
        case Accepted():
            return f"accepted {event.ticket}: {event.reply}"
        case Refused():
            return f"refused {event.ticket} at {event.stage}: {event.reply}"
        case Lost():
            last_word = f" ({event.reply})" if event.reply is not None else ""
            return f"lost {event.ticket} at {event.stage}: {event.why}{last_word}"
        case InDoubt():
            last_word = f" ({event.reply})" if event.reply is not None else ""
            return f"in doubt {event.ticket}: {event.why}{last_word}"
