"""A server that keeps the rules and remembers what it took: the oracle for what the dialogue reports.

It reads the client's bytes as RFC 5321 and 3030 say, one command at a time, and asks `mood` how to answer each. Servers
differ where the RFCs leave room; those differences are its flavours.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec


class Taken(msgspec.Struct, frozen=True):
    """A message the server accepted."""

    return_path: str
    recipient: str
    content: bytes


class Flavour(msgspec.Struct, frozen=True):
    keeps_refused_open: bool = False  # a refused BDAT or DATA leaves MAIL in force; the next MAIL is nested
    data_without_recipient: bool = False  # answers 354 to a DATA without recipients
    knows_bdat: bool = True


class ModelServer:
    """Bytes in (`hear`), bytes out. `mood(stage)` gives a reply code; 0 hangs up, also -1 after having taken it."""

    def __init__(self, flavour: Flavour, mood: Callable[[str], int]) -> None:
        self.flavour = flavour
        self.mood = mood
        self.taken: list[Taken] = []
        self.is_gone = False
        self._buffer = b""
        self._mail: str | None = None
        self._rcpt: str | None = None
        self._in_data = False
        self.commands: list[str] = []

    def hear(self, data: bytes) -> bytes:
        self._buffer += data
        said = b""
        while not self.is_gone:
            reply = self._step()
            if reply is None:
                break
            said += reply
        return said

    def _step(self) -> bytes | None:
        if self._in_data:
            if self._buffer.startswith(b".\r\n"):
                content, self._buffer = b"", self._buffer[3:]
            else:
                end = self._buffer.find(b"\r\n.\r\n")
                if end < 0:
                    return None
                content, self._buffer = self._buffer[: end + 2], self._buffer[end + 5 :]
            self._in_data = False
            content = re.sub(rb"(?m)^\.", b"", content)
            return self._ended(content)
        line, found, rest = self._buffer.partition(b"\r\n")
        if not found:
            return None
        text = line.decode()
        word = text.split(" ")[0].split(":")[0].upper()
        if word == "BDAT" and self.flavour.knows_bdat:
            size = int(text.split(" ")[1])
            if len(rest) < size:
                return None
            content, self._buffer = rest[:size], rest[size:]
            self.commands.append(text)
            if self._rcpt is None:
                return self._drop(b"503 5.5.1 no valid recipients\r\n")
            return self._ended(content)
        self._buffer = rest
        self.commands.append(text)
        match word:
            case "MAIL":
                if self._mail is not None:
                    return b"503 5.5.1 nested MAIL\r\n"
                return self._answer("mail", 250, lambda: self._set(mail=text[11:].split(">")[0]))
            case "RCPT":
                if self._mail is None:
                    return b"503 5.5.1 need MAIL\r\n"
                return self._answer("rcpt", 250, lambda: self._set(rcpt=text[9:].split(">")[0]))
            case "DATA":
                if self._rcpt is None and not (self.flavour.data_without_recipient and self._mail is not None):
                    return b"503 5.5.1 need RCPT\r\n"
                return self._answer("data", 354, lambda: self._set(in_data=True))
            case "RSET":
                self._mail = self._rcpt = None
                return b"250 2.0.0 reset\r\n"
            case "QUIT":
                self.is_gone = True
                return b"221 2.0.0 bye\r\n"
            case _:
                return b"500 5.5.2 unknown\r\n"

    def _set(self, mail: str | None = None, rcpt: str | None = None, in_data: bool = False) -> None:
        self._mail = mail if mail is not None else self._mail
        self._rcpt = rcpt if rcpt is not None else self._rcpt
        self._in_data = in_data

    def _answer(self, stage: str, good: int, then: Callable[[], None]) -> bytes:
        code = self.mood(stage)
        if code <= 0:
            self.is_gone = True
            return b""
        if code < 400:
            then()
            return b"%d fine\r\n" % good
        if code == 421:
            self.is_gone = True
        return b"%d 4.0.0 not now\r\n" % code if code < 500 else b"%d 5.0.0 never\r\n" % code

    def _ended(self, content: bytes) -> bytes:
        if self._rcpt is None:
            return self._drop(b"554 5.5.1 no valid recipients\r\n")
        code = self.mood("dot")
        if code in (-1, 250):
            assert self._mail is not None
            self.taken.append(Taken(self._mail, self._rcpt, content))
        reply = self._drop(b"250 2.0.0 queued\r\n" if code == 250 else b"%d 0.0.0 no\r\n" % code)
        if code <= 0 or code == 421:
            self.is_gone = True
        if code == 250:
            self._mail = self._rcpt = None
        return b"" if code <= 0 else reply

    def _drop(self, reply: bytes) -> bytes:
        self._rcpt = None
        if not self.flavour.keeps_refused_open:
            self._mail = None
        return reply
