"""One SMTP conversation after its handshake, sans-I/O: bytes in, events out. Knows no socket, clock or policy.

RFC 5321 (SMTP), 2920 (PIPELINING), 3030 (CHUNKING), 1870 (SIZE), 6152 (8BITMIME), 6531 (SMTPUTF8), 9422 (LIMITS).

The rules
---------
1.  Every command written is owed one reply; replies answer the oldest command owed. A reply that nobody is owed, a
    line that is no reply, a reply of a class that cannot answer the command: the conversation is *out of step*, over.
2.  Each message handed in gets exactly one event. `Accepted`: 2xx to the end of its content. `Refused`: 4xx or 5xx.
    `Lost`: the end of its content did not leave, or the server said in so many words that it never began it: safe to
    send again. `InDoubt`: the end of its content left and no reply to it can be trusted any more (RFC 1047).
3.  A refusal in hand explains a hang-up better than "connection closed" does: a refused recipient stays refused.
4.  Content is sent only behind an accepted recipient. A 354 that follows a refusal gets a lone dot.
5.  RSET comes before the next MAIL after a refusal, and before each MAIL that is written while an earlier
    transaction's fate is unknown: a server that keeps a refused transaction open would else join the next recipient
    to the previous return path. Never before the first transaction: some servers shed load by punishing it.
6.  503 to MAIL, RCPT or DATA of any transaction but the first is our being out of step, never the recipient's
    fault: `Lost`. In the first transaction it is the server's answer: `Refused`, so that no row waits for ever.
7.  421 ends the conversation. To the MAIL of a reused connection it is `Lost` (no attempt); to any later command it
    refuses that message. What was not begun is `Lost` with the 421 as the reason. What had left whole behind it, in a
    window, is `Lost` too where the server then closes without another word: it has said that it serves no more and has
    done so (RFC 5321 §3.8 has it close), and a server that took a message would have had to answer four commands of it
    first. Any reply after the 421 shows a server that goes on: its word counts for each message that it answers, and
    the others are `InDoubt`. So they are where we close, or the path fails: then nobody knows what it read.
8.  The first BDAT of a connection goes alone, until one has been accepted there before: a server that offers CHUNKING
    and does not know BDAT would read the content as commands.

Three manners, by what the server offered and the settings allow:

    lock-step    MAIL ? RCPT ? DATA ? content . ?                    four round trips a message
    pipelined    content . RSET? MAIL RCPT DATA ?                    one: the next envelope goes behind this dot
    windowed     MAIL RCPT BDAT content RSET MAIL RCPT BDAT ... ?    one for `depth` messages
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from engine.smtp.values import (
    Accepted,
    Event,
    InDoubt,
    Lost,
    Manner,
    Offer,
    Outgoing,
    Patience,
    Refused,
    Stage,
)
from formats.reply import CODES, Reply, parse_reply

__all__ = [
    "Accepted",
    "Dialogue",
    "Event",
    "InDoubt",
    "Lost",
    "Manner",
    "Offer",
    "Outgoing",
    "Patience",
    "Refused",
    "Stage",
]


class Meaning(StrEnum):
    """What a reply says to the command that it answers."""

    GO_ON = "go on"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    OUT_OF_STEP = "out of step"
    TOLERATED = "tolerated"  # finish what is in hand, begin nothing more


# What the first digit of a reply means to each command. Only 354 (3xx) lets content follow, only 2xx accepts it.
MEANING: Final[dict[Stage, dict[int, Meaning]]] = {
    Stage.RSET: {2: Meaning.GO_ON, 3: Meaning.OUT_OF_STEP, 4: Meaning.TOLERATED, 5: Meaning.TOLERATED},
    Stage.MAIL: {2: Meaning.GO_ON, 3: Meaning.OUT_OF_STEP, 4: Meaning.REFUSED, 5: Meaning.REFUSED},
    Stage.RCPT: {2: Meaning.GO_ON, 3: Meaning.OUT_OF_STEP, 4: Meaning.REFUSED, 5: Meaning.REFUSED},
    Stage.DATA: {2: Meaning.OUT_OF_STEP, 3: Meaning.GO_ON, 4: Meaning.REFUSED, 5: Meaning.REFUSED},
    Stage.DOT: {2: Meaning.ACCEPTED, 3: Meaning.OUT_OF_STEP, 4: Meaning.REFUSED, 5: Meaning.REFUSED},
    Stage.QUIT: dict.fromkeys((2, 3, 4, 5), Meaning.TOLERATED),
}

# To these 2xx means GO_ON. Names of their own, because an attribute of an enum costs as much as the comparison.
_MAIL, _RCPT, _RSET = Stage.MAIL, Stage.RCPT, Stage.RSET

CLOSING = 421
BAD_SEQUENCE = 503
# "I do not know this command": to BDAT they say that CHUNKING was a lie.
NOT_UNDERSTOOD = frozenset({500, 501, 502, 503, 504})

MAX_REPLY_BYTES = 32_768
# Above this a single write costs more than it saves: the kernel takes fresh pages for it (measured: 7 µs a message at
# 64 KB, 22 µs at 160 KB, 20 KB messages).
MAX_WRITE_BYTES = 96_000
# A peer may take a long message slowly without being a tarpit.
SLOWEST_BYTES_PER_S = 10_000

_LINE_BEGINS_WITH_DOT = re.compile(rb"\n\.")


class _Transaction:
    """One message on its way: what was said about it so far."""

    __slots__ = ("by_bdat", "dot_at", "fate", "is_first", "message", "settled")

    def __init__(self, message: Outgoing, is_first: bool) -> None:
        self.message = message
        self.is_first = is_first
        self.by_bdat = False  # its content goes out with its envelope, before any reply to it
        self.dot_at = 0  # bytes of the connection up to and with the end of the content; 0: not written
        self.fate: Refused | Lost | None = None  # what it comes to unless the end of its content is accepted
        self.settled = False  # its event is out


class Dialogue:
    """The conversation. `take` messages, `pull` bytes to write, `receive` bytes that came; each tells what it must.

    The caller writes all that `pull` gives, at once and in order, and calls `lose` exactly once when the connection is
    gone or `is_over` says that it must go.
    """

    __slots__ = (
        "_ahead", "_begun", "_chunking", "_content_due", "_depth", "_dots", "_ending", "_events", "_farewell",
        "_goes_on", "_lines", "_lines_bytes", "_needs_rset", "_offer", "_owed", "_pipelining", "_proven",
        "_quit_written", "_rest", "_script", "_waiting", "_written", "accepted", "depth", "in_hand", "is_over",
        "last_stage", "lies", "refused", "replies", "taken", "why",
    )  # fmt: skip

    def __init__(self, offer: Offer, manner: Manner = Manner(), *, chunking_proven: bool = False) -> None:  # noqa: B008
        self._offer = offer
        # Lists, though taken from the front: they are short, and an empty deque costs 600 bytes in each connection.
        self._owed: list[tuple[Stage, _Transaction | None]] = []
        self._waiting: list[Outgoing] = []
        self._script: list[tuple[Stage, _Transaction | None]] = []  # lock-step: commands not yet written
        self._content_due: _Transaction | None = None  # a 354 was given for it
        self._rest = b""  # an incomplete line
        self._lines: list[bytes] = []  # the lines before the last of an incomplete reply
        self._lines_bytes = 0
        self._events: list[Event] = []
        self._dots = 0  # ends of content whose replies are owed
        self._begun = 0
        self._written = 0
        self._needs_rset = False
        self._proven = chunking_proven
        self._ending = False
        self._quit_written = False
        self._farewell: Reply | None = None
        self._goes_on = False  # replies came after the 421
        self.taken = 0  # messages handed in
        self.accepted = 0
        self.refused = 0
        self.in_hand = 0  # handed in, no event yet
        self.replies = 0
        self.last_stage = Stage.MAIL  # when over: the command whose reply was owed at the end
        self.is_over = False  # close the connection and call `lose`
        self.why = ""
        self.lies: str = ""  # an extension the server offered and did not keep: "chunking" or "pipelining"
        self.adopt(manner)

    def adopt(self, manner: Manner) -> None:
        """Go on in this manner. What is already written stays; chunking and pipelining change between messages."""
        self._depth = manner.depth
        self._pipelining = manner.pipelining and self._offer.pipelining
        # Without PIPELINING a command behind BDAT's content must wait for its reply, so chunking would win nothing.
        self._chunking = manner.chunking and self._offer.chunking and self._pipelining
        self._ahead = manner.ahead
        # How many messages are worth having in hand: in lock-step one speaks and one waits.
        self.depth = manner.depth if self._pipelining else min(manner.depth, 2)

    # ---- what the caller asks

    @property
    def is_idle(self) -> bool:
        return not self.in_hand and not self._owed

    @property
    def is_ending(self) -> bool:
        """Begins nothing more."""
        return self._ending or self.is_over

    @property
    def has_quit(self) -> bool:
        """QUIT is written: all that was in hand is answered."""
        return self._quit_written

    @property
    def mail_max(self) -> int | None:
        """How many transactions the server allows in this connection, where it said so."""
        return self._offer.mail_max

    @property
    def chunking_proven(self) -> bool:
        return self._proven

    @property
    def farewell(self) -> Reply | None:
        """The 421 or other last word that explains the end."""
        return self._farewell

    @property
    def stage(self) -> Stage | None:
        """The command whose reply is owed next; None where none is."""
        return self._owed[0][0] if self._owed else None

    def patience_s(self, patience: Patience) -> float | None:
        """How long to wait for the reply owed next, from the moment it became the next; None where none is owed."""
        if not self._owed:
            return None
        stage, transaction = self._owed[0]
        if self._farewell is not None:
            return patience.farewell_s
        match stage:
            case Stage.QUIT:
                return patience.quit_s
            case Stage.DATA:
                return patience.data_s
            case Stage.DOT:
                size = len(transaction.message.content) if transaction else 0
                return patience.dot_s + size / SLOWEST_BYTES_PER_S
            case _:
                return patience.command_s

    # ---- messages in

    def take(self, batch: Sequence[Outgoing]) -> list[Event]:
        """Hand in messages; the events of those that cannot be sent at all, or no more."""
        self.taken += len(batch)
        self.in_hand += len(batch)
        if self._ending or self.is_over:
            for message in batch:
                self._tell(Lost(message.ticket, Stage.MAIL, self.why or "connection is closing", self._farewell))
            return self._take_events()
        for message in batch:
            problem = self._problem_of(message)
            if problem is None:
                self._waiting.append(message)
            else:
                self._tell(Refused(message.ticket, Stage.MAIL, problem))
        return self._take_events()

    def finish(self) -> None:
        """QUIT once all in hand is answered; take nothing more."""
        self._ending = True

    def _problem_of(self, message: Outgoing) -> Reply | None:
        offer = self._offer
        size = len(message.content)
        if offer.size and size > offer.size:
            return Reply(552, f"5.3.4 message of {size} bytes, the server takes {offer.size} (SIZE)", local=True)
        recipient = message.recipient
        # A control character here could only come from a bug of ours, and would be a command of its own.
        if not (recipient.isprintable() and message.return_path.isprintable()):
            return Reply(553, "5.1.3 address contains a control character", local=True)
        is_ascii = recipient.isascii() and message.return_path.isascii()
        if (message.smtputf8 or not is_ascii) and not offer.smtputf8:
            return Reply(553, "5.6.7 address needs SMTPUTF8, which the server does not offer", local=True)
        if not offer.eight_bit and not message.content.isascii():
            return Reply(554, "5.6.3 content is 8-bit and the server does not offer 8BITMIME", local=True)
        return None

    # ---- bytes out

    def pull(self) -> bytes:
        """What to write now, at most about MAX_WRITE_BYTES unless one message is longer; empty where nothing is.

        The ends of content in it count as left. Call again until it is empty, or until the transport is full.
        """
        if self.is_over:
            return b""
        if self._script or not self._pipelining:
            data = self._pull_in_lock_step()
        elif self._content_due is None and self._is_envelope_out:
            data = b""
        elif self._chunking and self._content_due is None:
            data = self._pull_window()
        else:
            data = self._pull_pipelined()
        if not data and self._ending and not (self.in_hand or self._owed or self._quit_written or self._farewell):
            self._quit_written = True
            self._owed.append((Stage.QUIT, None))
            data = b"QUIT\r\n"
        self._written += len(data)
        return data

    def _pull_pipelined(self) -> bytes:
        parts: list[bytes] = []
        behind = 0
        due = self._content_due
        if due is not None:
            self._content_due = None
            behind = self._write_content(parts, due)
        if self._waiting and not self._farewell and (self._ahead or not self._dots):
            is_behind_bdat = bool(self._owed) and self._is_windowed(self._owed[-1][1])
            transaction = self._begin()
            if self._needs_rset or is_behind_bdat:
                self._needs_rset = False
                parts.append(b"RSET\r\n")
                self._owed.append((Stage.RSET, transaction))
            parts.append(b"%b%bDATA\r\n" % (self._mail(transaction), self._rcpt(transaction)))
            owed = self._owed
            owed.append((Stage.MAIL, transaction))
            owed.append((Stage.RCPT, transaction))
            owed.append((Stage.DATA, transaction))
        if due is not None and not due.settled:
            due.dot_at = self._written + behind
        return b"".join(parts)

    def _write_content(self, parts: list[bytes], transaction: _Transaction) -> int:
        """Content and dot into `parts`, a lone dot where the message is refused; its length."""
        self._owed.append((Stage.DOT, transaction))
        self._dots += 1
        if transaction.settled:
            parts.append(b".\r\n")
            return 3
        content = transaction.message.content
        if not transaction.message.dot_free:
            content = stuffed(content)
        parts.append(content)
        parts.append(b".\r\n" if content.endswith(b"\r\n") else b"\r\n.\r\n")
        return len(content) + len(parts[-1])

    def _pull_window(self) -> bytes:
        waiting = self._waiting
        limit = self._depth if self._proven else 1
        if not waiting or self._dots >= limit or self._farewell:
            return b""
        parts: list[bytes] = []
        size = 0
        owed = self._owed
        while waiting and self._dots < limit and size < MAX_WRITE_BYTES:
            if size and size + len(waiting[0].content) > MAX_WRITE_BYTES:
                break
            is_clean = not (self._dots or self._needs_rset)
            transaction = self._begin()
            transaction.by_bdat = True
            content = transaction.message.content
            end = b"" if content.endswith(b"\r\n") else b"\r\n"
            mail = self._mail(transaction)
            if not (is_clean or transaction.is_first):
                self._needs_rset = False
                mail = b"RSET\r\n" + mail
                owed.append((Stage.RSET, transaction))
            head = b"%b%bBDAT %d LAST\r\n" % (mail, self._rcpt(transaction), len(content) + len(end))
            parts += (head, content, end)
            size += len(head) + len(content) + len(end)
            transaction.dot_at = self._written + size
            owed.append((Stage.MAIL, transaction))
            owed.append((Stage.RCPT, transaction))
            owed.append((Stage.DOT, transaction))
            self._dots += 1
        return b"".join(parts)

    def _pull_in_lock_step(self) -> bytes:
        if self._owed:
            return b""
        due = self._content_due
        if due is not None:
            self._content_due = None
            parts: list[bytes] = []
            size = self._write_content(parts, due)
            if not due.settled:
                due.dot_at = self._written + size
            return b"".join(parts)
        if not self._script and self._waiting and not self._farewell:
            transaction = self._begin()
            if self._needs_rset:
                self._needs_rset = False
                self._script.append((Stage.RSET, transaction))
            self._script += ((stage, transaction) for stage in (Stage.MAIL, Stage.RCPT, Stage.DATA))
        if not self._script:
            return b""
        stage, speaker = self._script.pop(0)
        self._owed.append((stage, speaker))
        assert speaker is not None
        match stage:
            case Stage.MAIL:
                return self._mail(speaker)
            case Stage.RCPT:
                return self._rcpt(speaker)
            case _:
                return b"%b\r\n" % stage.upper().encode()

    @property
    def _is_envelope_out(self) -> bool:
        """Commands are owed replies without which nothing may follow: a DATA group, or QUIT."""
        return bool(self._owed) and self._owed[-1][0] is not Stage.DOT

    @staticmethod
    def _is_windowed(transaction: _Transaction | None) -> bool:
        return transaction is not None and transaction.by_bdat

    def _begin(self) -> _Transaction:
        transaction = _Transaction(self._waiting.pop(0), self._begun == 0)
        self._begun += 1
        return transaction

    def _mail(self, transaction: _Transaction) -> bytes:
        message = transaction.message
        parameters = b""
        offer = self._offer
        if offer.size is not None:
            parameters = b" SIZE=%d" % len(message.content)
        if offer.eight_bit and not message.content.isascii():
            parameters += b" BODY=8BITMIME"
        if message.smtputf8 or not (message.recipient.isascii() and message.return_path.isascii()):
            parameters += b" SMTPUTF8"
        return b"MAIL FROM:<%b>%b\r\n" % (message.return_path.encode(), parameters)

    def _rcpt(self, transaction: _Transaction) -> bytes:
        return b"RCPT TO:<%b>\r\n" % transaction.message.recipient.encode()

    # ---- bytes in

    def receive(self, data: bytes) -> list[Event]:
        """What these bytes settle. Afterwards: write what `pull` gives, and look at `is_over`."""
        if self._rest:
            data = self._rest + data
        lines = data.split(b"\n")
        self._rest = lines.pop()
        owed = self._owed
        for line in lines:
            # Three replies of four are a plain yes: no meaning to look up. (Half the time of this method.)
            if line[:4] == b"250 " and owed and not (self._lines or self._farewell or self.is_over):
                stage = owed[0][0]
                if stage is _MAIL or stage is _RCPT or stage is _RSET:
                    owed.pop(0)
                    self.replies += 1
                    continue
            if self.is_over:
                break
            code = CODES.get(line[:3])
            if code is None:
                self._out_of_step("the server sent what is no reply", parse_reply([*self._lines, line]))
                break
            mark = line[3:4]
            if mark == b"-":
                self._lines.append(line)
                self._lines_bytes += len(line)
                if self._lines_bytes > MAX_REPLY_BYTES:
                    self._out_of_step(f"a reply longer than {MAX_REPLY_BYTES} bytes", parse_reply(self._lines[:20]))
                continue
            if mark not in (b" ", b"\r", b""):
                self._out_of_step("the server sent what is no reply", parse_reply([line]))
                break
            if self._lines:
                whole = [*self._lines, line]
                self._lines = []
                self._lines_bytes = 0
                self._answered(code, whole)
            else:
                self._answered(code, (line,))
        if len(self._rest) > MAX_REPLY_BYTES and not self.is_over:
            self._out_of_step(f"a reply longer than {MAX_REPLY_BYTES} bytes", parse_reply([self._rest[:200]]))
        if self._farewell is not None and not self._dots and not self.is_over:
            self._end(self.why)  # the dots that had left before the 421 are answered
        return self._take_events()

    def _answered(self, code: int, lines: Sequence[bytes]) -> None:
        self.replies += 1
        if not self._owed:
            reply = parse_reply(lines)
            if code == CLOSING:
                self._farewell = reply
                self._end("the server closed the connection")
            else:
                self._out_of_step("a reply that no command was owed", reply)
            return
        if self._farewell is not None:
            self._goes_on = True
        stage, transaction = self._owed.pop(0)
        if code == CLOSING and stage is not Stage.QUIT:
            self._closing(stage, transaction, parse_reply(lines))
            return
        meaning = MEANING[stage][code // 100]
        if meaning is Meaning.GO_ON:
            if stage is Stage.DATA:
                self._content_due = transaction
        elif meaning is Meaning.ACCEPTED:
            assert transaction is not None
            self._accepted(transaction, lines)
        elif meaning is Meaning.REFUSED:
            assert transaction is not None
            self._refused(stage, transaction, parse_reply(lines))
        elif meaning is Meaning.TOLERATED:
            if stage is Stage.QUIT:
                self._end("finished")
            else:
                self._begin_no_more(f"the server refused {stage.upper()}", parse_reply(lines))
        else:
            self._out_of_step(f"the reply cannot answer {stage.upper()}", parse_reply(lines))
            self._settle_out_of_step(stage, transaction)

    def _settle_out_of_step(self, stage: Stage, transaction: _Transaction | None) -> None:
        """The reply just read was the last that this transaction was owed, or nearly; nothing better will come."""
        if transaction is None or transaction.settled:
            return
        ticket = transaction.message.ticket
        if stage is Stage.DOT:
            self._dots -= 1
            self._settle(transaction, InDoubt(ticket, self.why, self._farewell))
        elif not transaction.by_bdat and stage is not Stage.RSET:
            self._settle(transaction, Lost(ticket, stage, self.why, self._farewell))

    def _begin_no_more(self, why: str, reply: Reply) -> None:
        """What is on its way may finish; what waits is given back."""
        self._ending = True
        self.why = why
        for message in self._waiting:
            self._tell(Lost(message.ticket, Stage.MAIL, why, reply))
        self._waiting.clear()

    def _accepted(self, transaction: _Transaction, lines: Sequence[bytes]) -> None:
        self._dots -= 1
        if transaction.settled:
            return  # a lone dot
        # Whatever MAIL and RCPT were answered: the server says that it has it, so it must not be sent again.
        self.accepted += 1
        if self._chunking:
            self._proven = True
        self._settle(transaction, Accepted(transaction.message.ticket, parse_reply(lines)))

    def _refused(self, stage: Stage, transaction: _Transaction, reply: Reply) -> None:
        if stage is Stage.DOT:
            self._dots -= 1
        if transaction.settled:
            return  # its fate was told; these are the replies to the rest of its group
        if (
            transaction.by_bdat
            and stage is Stage.DOT
            and not self._proven
            and self._is_bdat_unknown(transaction, reply)
        ):
            self.lies = "chunking"
        fate = transaction.fate or self._fate(stage, transaction, reply)
        if transaction.by_bdat and stage is not Stage.DOT:
            # Its content is out already. Should the server accept that after all, it counts (see `_accepted`).
            transaction.fate = fate
            return
        self._script.clear()  # lock-step: nothing more to say about it
        if not self._is_envelope_out or stage is not Stage.DOT:
            self._needs_rset = True
        self._settle(transaction, fate)
        if isinstance(fate, Lost) and transaction.by_bdat and self._proven:
            self._begin_no_more(fate.why, reply)
        elif isinstance(fate, Lost):
            self._out_of_step(fate.why, reply)
        elif self.lies:
            self._out_of_step("the server did not understand BDAT", reply)

    @staticmethod
    def _is_bdat_unknown(transaction: _Transaction, reply: Reply) -> bool:
        """The reply to BDAT says that CHUNKING was a lie; behind a refused recipient 503 says just that."""
        return reply.code in NOT_UNDERSTOOD and (transaction.fate is None or reply.code != BAD_SEQUENCE)

    def _fate(self, stage: Stage, transaction: _Transaction, reply: Reply) -> Refused | Lost:
        """What a refusal at this stage comes to."""
        ticket = transaction.message.ticket
        if stage is Stage.DOT:
            if transaction.by_bdat and reply.code in NOT_UNDERSTOOD:
                return Lost(ticket, stage, "the server did not understand BDAT", reply)
        elif reply.code == BAD_SEQUENCE and not transaction.is_first:
            return Lost(ticket, stage, "out of step with the server", reply)
        return Refused(ticket, stage, reply)

    def _closing(self, stage: Stage, transaction: _Transaction | None, reply: Reply) -> None:
        self._farewell = reply
        self._ending = True
        self.why = "the server closed the connection"
        if stage is Stage.DOT:
            self._dots -= 1
        if transaction is not None and not transaction.settled and stage is not Stage.RSET:
            fate: Refused | Lost | None = transaction.fate
            if fate is None:
                ticket = transaction.message.ticket
                is_reused = stage is Stage.MAIL and not transaction.is_first
                fate = Lost(ticket, stage, self.why, reply) if is_reused else Refused(ticket, stage, reply)
            if transaction.by_bdat and stage is not Stage.DOT:
                transaction.fate = fate
            else:
                self._settle(transaction, fate)
        if not self._dots:
            self._end(self.why)

    # ---- the end

    def lose(self, why: str, *, unsent: int = 0, by_peer: bool = False) -> list[Event]:
        """The connection is gone: an event for everything still in hand.

        `unsent`: how many of the bytes that `pull` gave are known not to have left this machine. `by_peer`: the server
        closed it, neither we nor the path.
        """
        self.is_over = True
        self.why = self.why or why
        if self._owed:
            self.last_stage = self._owed[0][0]
        left = self._written - unsent
        if by_peer and self._farewell is not None and self._farewell.code == CLOSING and not self._goes_on:
            left = 0  # it said that it would go, and went (rule 7)
        seen: set[int] = set()
        for stage, transaction in (*self._owed, (Stage.DOT, self._content_due), *self._script):
            if transaction is None or transaction.settled or id(transaction) in seen:
                continue
            seen.add(id(transaction))
            ticket = transaction.message.ticket
            if transaction.fate is not None:
                fate: Event = transaction.fate
            elif 0 < transaction.dot_at <= left:
                fate = InDoubt(ticket, self.why, self._farewell)
            else:
                fate = Lost(ticket, Stage.MAIL if stage is Stage.RSET else stage, self.why, self._farewell)
            self._settle(transaction, fate)
        for message in self._waiting:
            self._tell(Lost(message.ticket, Stage.MAIL, self.why, self._farewell))
        self._owed.clear()
        self._script.clear()
        self._waiting.clear()
        self._content_due = None
        self._rest = b""
        self._lines = []
        return self._take_events()

    def expire(self) -> str:
        """Patience with the reply owed next has run out; why, in words. Call `lose` with it."""
        stage = self.stage or Stage.MAIL
        # Answered MAIL and then silence: a peer that throws away what came behind the first command.
        if self._pipelining and stage in (Stage.RCPT, Stage.DATA) and not self.accepted:
            self.lies = "pipelining"
        return f"no reply to {'the final dot' if stage is Stage.DOT else stage.upper()} in time"

    def _end(self, why: str) -> None:
        self.is_over = True
        self.why = why

    def _out_of_step(self, why: str, reply: Reply) -> None:
        self._farewell = reply
        self._end(why)

    def _settle(self, transaction: _Transaction, event: Event) -> None:
        transaction.settled = True
        self._tell(event)

    def _tell(self, event: Event) -> None:
        self.in_hand -= 1
        if type(event) is Refused:
            self.refused += 1
        self._events.append(event)

    def _take_events(self) -> list[Event]:
        events = self._events
        if not events:
            return []  # never the list that the next event goes to
        self._events = []
        return events


def stuffed(content: bytes) -> bytes:
    """The content with every line's leading dot doubled (RFC 5321 §4.5.2)."""
    if _LINE_BEGINS_WITH_DOT.search(content):
        content = content.replace(b"\n.", b"\n..")
    return b"." + content if content.startswith(b".") else content
