"""The composer: rows become drafts, drafts become signed messages. Built by `render.build_composer`.

`compose` belongs to one thread; `compose_many` renders in the caller's thread and signs in a pool. Nothing of a row
stays behind in memory, but for caches of fixed size.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from itertools import islice
from typing import Any, Literal

import msgspec

from engine.compose.fields import Field, RowState, merged, return_domain, settings_address
from engine.compose.htmltext import html_to_text
from engine.compose.mime import Files, Hole, Piece
from engine.compose.sandbox import reason_of
from engine.compose.segments import SegmentBody, Slot
from engine.compose.sign import Signer
from engine.compose.template import EXTRAS, Body, Line, Variables
from engine.config import Attachment, Settings
from formats.address import Mailbox
from formats.dkim import BodyForm, BodyHasher, SignatureTemplate, signature_field
from formats.message import decode_qp, qp_fragment
from formats.verp import TokenMaker

NO_VARIABLES: Variables = {}
Signers = Sequence[tuple[Signer, SignatureTemplate]]
Row = tuple[int, Mailbox, Sequence[object]]  # number, recipient, values of the composer's columns
_SIGN_CHUNK = 32  # signatures a pool task makes: the hand-over costs some 30 µs, RSA-2048 240 to 900
_CHUNKS_WAITING = 4  # for a pool of that many threads; they bound the memory of what is rendered ahead


class Message(msgspec.Struct, frozen=True, gc=False):
    """Ready for the wire: CRLF everywhere, ends in CRLF, and no line begins with a dot.

    7-bit, but for a To field that names a UTF-8 local part; then `smtputf8` is true (RFC 6531, 6532).
    """

    return_path: str
    recipient: str
    content: bytes
    smtputf8: bool


class RowProblem(Exception):
    """Why this row has no message."""

    def __init__(self, reason: Literal["address", "render"], detail: str) -> None:
        super().__init__(detail)
        self.reason: Literal["address", "render"] = reason
        self.detail = detail


class Draft:
    """A message but for its signatures. `body` is in pieces, most of them shared by all rows."""

    __slots__ = ("body", "digests", "head", "is_utf8", "recipient", "return_path", "signers", "unsigned")

    def __init__(self, state: RowState, head: bytes, body: Sequence[bytes], signers: Signers = ()) -> None:
        self.return_path, self.recipient = state.return_path, state.address
        self.is_utf8 = not state.mailbox.local.isascii()
        self.head, self.body = head, body
        self.signers = signers
        self.unsigned: list[str] = []
        self.digests: list[bytes] = []

    def finish(self, signatures: Sequence[bytes]) -> Message:
        """The message, with its signatures in front."""
        content = self.head
        if signatures:
            signed = [signature_field(field, one) for field, one in zip(self.unsigned, signatures, strict=True)]
            content = b"".join(["".join(signed).encode("ascii"), self.head, *self.body])
        return Message(self.return_path, self.recipient, content, self.is_utf8)


class Composer:
    """Composes a campaign's messages. `columns` are what `compose` wants of a row, in this order."""

    def __init__(
        self,
        *,
        columns: tuple[str, ...],
        fingerprint: str,
        warnings: tuple[str, ...],
        settings: Settings,
        tokens: TokenMaker,
        fields: Sequence[Field],
        pieces: Sequence[Piece],
        bodies: dict[Hole, Body],
        lines: dict[str, Line],
        row_attachments: Sequence[tuple[int, Attachment]],
        files: Files,
        intakes: Sequence[tuple[str, Callable[[Any], Any]]],
        variables: Variables,
        extras: frozenset[str],
        signers: Signers,
        by_selector: Mapping[str, Signers],
        is_test: bool,
    ) -> None:
        self.columns = columns
        self.fingerprint = fingerprint
        self.warnings = warnings
        message = settings.message
        self._tokens, self._is_test = tokens, is_test
        self._return_path = str(settings_address("return_path", message.return_path)) if message.return_path else None
        self._return_domain = return_domain(message)
        # The header in pieces, and which of them each row makes: place, maker, "Name: ", length that needs no folding.
        header = [*merged(fields), ("\r\n", "")]
        self._written = [piece[0] if isinstance(piece, tuple) else "" for piece in header]
        self._relaxed = [piece[1] if isinstance(piece, tuple) else "" for piece in header]
        self._makers = tuple(
            (at, piece, f"{piece.name}: ", piece.room) for at, piece in enumerate(header) if isinstance(piece, Field)
        )
        self._bodies, self._lines = bodies, lines
        self._row_attachments, self._files = row_attachments, files
        self._intakes, self._globals, self._extras = intakes, variables, extras
        self._needs_variables = any(body.segments is None for body in bodies.values()) or any(
            line.needs_variables for line in lines.values()
        )
        self._url = (message.unsubscribe_url or "").partition("{token}")
        self._fixed_extras = (settings.campaign.id, settings.campaign.list_id)
        every = [one for some in (signers, *by_selector.values()) for one in some]
        self._canonical = any(template.body_form == "relaxed" for _, template in every)
        self._segment_body = _segment_body(pieces, bodies, canonical=self._canonical)
        # Looked up once: hashing an Enum's member costs more than a field does.
        self._steps = tuple(piece if isinstance(piece, str) else bodies.get(piece, piece) for piece in pieces)
        self._makes_text = Hole.TEXT in self._steps
        self._boundary_line = ""
        if row_attachments:
            closing = pieces[-1]
            assert isinstance(closing, str)
            self._boundary_line = closing.removesuffix("--\r\n") + "\r\n"
        prefix = pieces[0] if pieces and isinstance(pieces[0], str) else ""
        after = pieces[1] if prefix and len(pieces) > 1 else (pieces[0] if pieces else "")
        if isinstance(after, Hole) and after in bodies:
            prefix += bodies[after].leading
        self._signers = tuple(signers)
        self._by_selector = {selector: tuple(some) for selector, some in by_selector.items()}
        forms: set[BodyForm] = {template.body_form for _, template in every}
        self._hashers = {form: BodyHasher(prefix.encode("ascii"), form) for form in forms}

    # --- one message

    def compose(
        self, row: int, mailbox: Mailbox, values: Sequence[object], now_us: int, selector: str | None = None
    ) -> Message:
        """The message of `row` for an attempt at `now_us`, signed as its source does (`draft`); raises RowProblem."""
        if self._signers:
            draft = self.draft(row, mailbox, values, now_us, selector)
            return draft.finish(self._sign([draft])[0])
        try:
            state = self._state(row, mailbox, values, now_us)
            content = self._unsigned(state)
        except Exception as problem:
            raise _row_problem(problem) from problem
        return Message(state.return_path, state.address, content, not mailbox.local.isascii())

    def draft(
        self, row: int, mailbox: Mailbox, values: Sequence[object], now_us: int, selector: str | None = None
    ) -> Draft:
        """The message but for its signatures, which are the expensive part; raises RowProblem.

        `selector` is its source's, one of those that the composer was built with; None: the campaign's own.
        """
        signers = self._signers if selector is None else self._by_selector[selector]
        try:
            state = self._state(row, mailbox, values, now_us)
            return self._signable(state, signers) if signers else Draft(state, self._unsigned(state), ())
        except Exception as problem:
            # Whatever a template or a value does belongs to its row, never to the process.
            raise _row_problem(problem) from problem

    def _state(self, row: int, mailbox: Mailbox, values: Sequence[Any], now_us: int) -> RowState:
        message_id, bounce, token = self._tokens.strings(row)
        state = RowState()
        state.mailbox, state.address = mailbox, f"{mailbox.local}@{mailbox.domain}"
        state.return_path = self._return_path or f"{bounce}@{self._return_domain}"
        state.token, state.now_s = token, now_us // 1_000_000
        # Providers drop a second message of one Message-ID: a test is sent again on purpose.
        state.message_id = f"{message_id}.{now_us:x}" if self._is_test else message_id
        state.values, state.variables, state.subject = values, NO_VARIABLES, None
        if self._extras:
            self._add_extras(state, row)
        if self._needs_variables:
            self._add_variables(state)
        if self._extras:
            self._add_lines(state)
        return state

    def _unsigned(self, state: RowState) -> bytes:
        written = self._written.copy()
        for at, field, lead, room in self._makers:
            value = field.make(state)
            if value:
                written[at] = f"{lead}{value}\r\n" if len(value) < room else field.write(value)
        return b"".join(["".join(written).encode(), *self._body(state)])

    def _signable(self, state: RowState, signers: Signers) -> Draft:
        written, relaxed = self._written.copy(), self._relaxed.copy()
        for at, field, lead, room in self._makers:
            value = field.make(state)
            if value:
                written[at] = f"{lead}{value}\r\n" if len(value) < room else field.write(value)
                relaxed[at] = field.relaxed(value)
        body = self._body(state)
        draft = Draft(state, "".join(written).encode(), body, signers)
        hashes = {form: hasher.digest(body) for form, hasher in self._hashers.items()}
        covered = "".join(relaxed)
        for _, template in signers:
            unsigned, canonical = template.unsigned(state.now_s, hashes[template.body_form])
            draft.unsigned.append(unsigned)
            draft.digests.append(hashlib.sha256((covered + canonical).encode()).digest())
        return draft

    def _body(self, state: RowState) -> list[bytes]:
        """The body's pieces, in order."""
        values = state.values
        if self._segment_body is not None:
            return self._segment_body.fill(values)
        variables = state.variables
        html: list[str] | None = None
        if self._makes_text:
            html = list(self._bodies[Hole.HTML].fill(values, variables))
            text = html_to_text(decode_qp("".join(html)))
        out: list[str] = []
        for step in self._steps:
            if type(step) is str:
                out.append(step)
            elif isinstance(step, Body):
                out += html if html is not None else step.fill(values, variables)
            elif step is Hole.TEXT:
                out.append(qp_fragment(text, canonical=self._canonical))
            else:
                out.append(self._attachments(state))
        return ["".join(out).encode("ascii")]

    def _attachments(self, state: RowState) -> str:
        out = []
        for index, attachment in self._row_attachments:
            path = state.values[index]
            if path is None or path == "":
                continue
            try:
                out.append(f"{self._boundary_line}{self._files.of_row(str(path), attachment)}\r\n")
            except OSError as problem:
                raise RowProblem("render", f"attachment {str(path)!r}: {problem.strerror or problem}") from None
            except Exception as problem:
                raise RowProblem("render", f"attachment {str(path)!r}: {problem}") from None
        return "".join(out)

    # --- what templates see

    def _add_extras(self, state: RowState, row: int) -> None:
        before, marker, after = self._url
        url = f"{before}{state.token}{after}" if marker else None
        state.values = [*state.values, url, *self._fixed_extras, row, state.address, None, None]

    def _add_variables(self, state: RowState) -> None:
        variables = state.variables = self._globals.copy()
        values = state.values
        for index, (name, take) in enumerate(self._intakes):
            value = values[index]
            variables[name] = value if type(value) is str and "\r" not in value else take(value)
        if self._extras:
            for name, value in zip(EXTRAS, values[len(self.columns) :], strict=True):
                if name in self._extras:
                    variables[name] = value

    def _add_lines(self, state: RowState) -> None:
        """Subject and preheader, which bodies may show; after the rest, for they are templates too."""
        for name in ("subject", "preheader"):
            if name in self._extras and name in self._lines:
                text = self._lines[name].text(state.values, state.variables)
                state.values[len(self.columns) + EXTRAS.index(name)] = text  # type: ignore[index]  # a list by now
                if self._needs_variables:
                    state.variables[name] = text
                if name == "subject":
                    state.subject = text

    # --- many messages

    @property
    def signs(self) -> bool:
        """Whether messages are signed: then `draft` and, in a thread, `sign` keep the loop free."""
        return bool(self._signers)

    def sign(self, drafts: Sequence[Draft]) -> list[Message]:
        """The signed messages of these drafts. May run in any thread, for the crypto releases the GIL."""
        return [draft.finish(signatures) for draft, signatures in zip(drafts, self._sign(drafts), strict=True)]

    def compose_many(
        self,
        rows: Iterable[Row],
        now_us: int,
        executor: Executor | None = None,
    ) -> list[Message | RowProblem]:
        """The messages of `rows` in order.

        With an executor of threads, signatures are made there while the next rows are rendered here. Rows go in chunks:
        signatures one after the other keep the key's tables in the processor's cache, and a finished chunk's memory is
        used again.
        """
        made: list[Message | RowProblem] = []
        waiting: deque[tuple[list[Draft | RowProblem], Future[list[list[bytes]]]]] = deque()
        for chunk in _chunks(rows, _SIGN_CHUNK):
            drafts = [self._draft_or_problem(row, mailbox, values, now_us) for row, mailbox, values in chunk]
            to_sign = [draft for draft in drafts if isinstance(draft, Draft)]
            if executor is None or not self._signers:
                made += _finished(drafts, self._sign(to_sign))
                continue
            waiting.append((drafts, executor.submit(self._sign, to_sign)))
            if len(waiting) > _CHUNKS_WAITING:
                oldest, signatures = waiting.popleft()
                made += _finished(oldest, signatures.result())
        for drafts, signatures in waiting:
            made += _finished(drafts, signatures.result())
        return made

    def _draft_or_problem(
        self, row: int, mailbox: Mailbox, values: Sequence[object], now_us: int
    ) -> Draft | RowProblem:
        try:
            return self.draft(row, mailbox, values, now_us)
        except RowProblem as problem:
            return problem

    def _sign(self, drafts: Sequence[Draft]) -> list[list[bytes]]:
        return [
            [signer.sign(digest) for (signer, _), digest in zip(draft.signers, draft.digests, strict=True)]
            for draft in drafts
        ]


def _chunks(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    source = iter(rows)
    while chunk := list(islice(source, size)):
        yield chunk


def _finished(
    drafts: Sequence[Draft | RowProblem], signatures: Sequence[Sequence[bytes]]
) -> Iterator[Message | RowProblem]:
    made = iter(signatures)
    for draft in drafts:
        yield draft.finish(next(made)) if isinstance(draft, Draft) else draft


def _row_problem(problem: Exception) -> RowProblem:
    return problem if isinstance(problem, RowProblem) else RowProblem("render", reason_of(problem))


def _segment_body(pieces: Sequence[Piece], bodies: dict[Hole, Body], *, canonical: bool) -> SegmentBody | None:
    """The whole body as segments, where no part needs more than that."""
    parts: list[str | Slot] = []
    for piece in pieces:
        if isinstance(piece, str):
            parts.append(piece)
        elif piece not in bodies or (segments := bodies[piece].segments) is None:
            return None
        else:
            parts += segments
    return SegmentBody(parts, canonical=canonical)
