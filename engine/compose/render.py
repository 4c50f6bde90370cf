"""A row becomes a message: envelope and content.

    composer = build_composer(settings, folder, schema)
    message = composer.compose(row, mailbox, values, now_us)

`compose` belongs to one thread; `compose_many` renders in the caller's thread and signs in a pool. Nothing of a row
stays behind in memory, but for caches of fixed size.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa

from engine.compose.fields import Field, RowState, check_unsubscribe_url, header_fields, merged, settings_address
from engine.compose.htmltext import html_to_text, text_template
from engine.compose.keys import load_keys
from engine.compose.mime import Files, Hole, Part, Piece, multipart, text_part
from engine.compose.sandbox import alias, reason_of
from engine.compose.segments import SegmentBody, Slot
from engine.compose.sign import Signer, body_form, load_signer
from engine.compose.template import EXTRAS, Body, Line, Surveyed, TemplateError, Variables, Workshop
from engine.compose.values import intake_for
from engine.config import Attachment, Settings, SettingsError
from formats.address import AddressError, Mailbox, domain_to_ascii
from formats.dkim import BodyForm, BodyHasher, SignatureTemplate, signature_field, signature_template, signed_names
from formats.message import decode_qp, qp_fragment
from formats.recipients import bare_name
from formats.verp import TokenMaker

NO_VARIABLES: Variables = {}
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

    __slots__ = ("body", "digests", "head", "is_utf8", "recipient", "return_path", "unsigned")

    def __init__(self, state: RowState, head: bytes, body: Sequence[bytes]) -> None:
        self.return_path, self.recipient = state.return_path, state.address
        self.is_utf8 = not state.mailbox.local.isascii()
        self.head, self.body = head, body
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
        signers: Sequence[tuple[Signer, SignatureTemplate]],
        is_test: bool,
    ) -> None:
        self.columns = columns
        self.fingerprint = fingerprint
        self.warnings = warnings
        message = settings.message
        self._tokens, self._is_test = tokens, is_test
        self._return_path = str(settings_address("return_path", message.return_path)) if message.return_path else None
        self._return_domain = _return_domain(settings)
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
        self._canonical = any(template.body_form == "relaxed" for _, template in signers)
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
        forms: set[BodyForm] = {template.body_form for _, template in signers}
        self._hashers = {form: BodyHasher(prefix.encode("ascii"), form) for form in forms}

    # --- one message

    def compose(self, row: int, mailbox: Mailbox, values: Sequence[object], now_us: int) -> Message:
        """The message of `row` for an attempt at `now_us`; raises RowProblem."""
        if self._signers:
            draft = self.draft(row, mailbox, values, now_us)
            return draft.finish(self._sign([draft])[0])
        try:
            state = self._state(row, mailbox, values, now_us)
            content = self._unsigned(state)
        except Exception as problem:
            raise _row_problem(problem) from problem
        return Message(state.return_path, state.address, content, not mailbox.local.isascii())

    def draft(self, row: int, mailbox: Mailbox, values: Sequence[object], now_us: int) -> Draft:
        """The message but for its signatures, which are the expensive part; raises RowProblem."""
        try:
            state = self._state(row, mailbox, values, now_us)
            return self._signable(state) if self._signers else Draft(state, self._unsigned(state), ())
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

    def _signable(self, state: RowState) -> Draft:
        written, relaxed = self._written.copy(), self._relaxed.copy()
        for at, field, lead, room in self._makers:
            value = field.make(state)
            if value:
                written[at] = f"{lead}{value}\r\n" if len(value) < room else field.write(value)
                relaxed[at] = field.relaxed(value)
        body = self._body(state)
        draft = Draft(state, "".join(written).encode(), body)
        hashes = {form: hasher.digest(body) for form, hasher in self._hashers.items()}
        covered = "".join(relaxed)
        for _, template in self._signers:
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
        signers = [signer for signer, _ in self._signers]
        return [
            [signer.sign(digest) for signer, digest in zip(signers, draft.digests, strict=True)] for draft in drafts
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


def _return_domain(settings: Settings) -> str:
    message = settings.message
    if not message.return_path_domain:
        return settings_address("from_address", message.from_address).domain
    try:
        return domain_to_ascii(message.return_path_domain)
    except AddressError as problem:
        raise SettingsError(file="campaign.toml", problem=f"message.return_path_domain: {problem}") from None


def build_composer(
    settings: Settings,
    folder: Path,
    schema: pa.Schema,
    *,
    generation: Literal["live", "test"] = "live",
    key_id: str | None = None,
) -> Composer:
    """The campaign's composer. `key_id` is the plan's; without one the ring's current key is used.

    Raises TemplateError (unknown column, syntax, files missing or outside the folder), KeysError, DkimKeyError,
    SettingsError.
    """
    message = settings.message
    schema = _bare(schema)
    ring = load_keys(folder / settings.keys.file)
    chosen = key_id or ring.current_id
    tokens = TokenMaker(settings.campaign.id, chosen, ring.key(chosen), is_test=generation == "test")
    canonical = any(table.canonicalization == "relaxed/relaxed" for table in settings.dkim)
    shop = Workshop(
        folder, message.language, message.timezone, canonical=canonical, preheader=message.preheader is not None
    )
    bodies, warnings = _survey_bodies(settings, shop)
    lines = _survey_lines(settings, shop)
    row_attached = [attachment for attachment in message.attachments if attachment.column]
    names: dict[str, tuple[str, int]] = {}
    # HTML first: the text may be made from it, and a problem is told of the file that was written.
    ordered = [bodies[hole] for hole in (Hole.HTML, Hole.TEXT) if hole in bodies]
    for surveyed in (*ordered, *lines.values()):
        surveyed.check(schema)
        names = surveyed.names | names
    for attachment in row_attached:
        if attachment.column not in schema.names:
            raise TemplateError(
                place="campaign.toml [[message.attachments]]", problem=f"the list has no column {attachment.column!r}"
            )
    wanted = names.keys() | {alias(attachment.column or "") for attachment in row_attached}
    columns = tuple(column for column in schema.names if alias(column) in wanted)
    extras = frozenset(name for name in names if name in EXTRAS and name not in map(alias, columns))
    if "unsubscribe_url" in extras and not message.unsubscribe_url:
        file, line = names["unsubscribe_url"]
        raise TemplateError(
            place=f"{file} line {line}", problem="names unsubscribe_url, and [message] unsubscribe_url is not set"
        )
    if message.unsubscribe_url:
        check_unsubscribe_url(message.unsubscribe_url)
    _refuse_circles(lines, extras)
    places = {name: len(columns) + place for place, name in enumerate(EXTRAS)}
    places |= {alias(column): place for place, column in enumerate(columns)}
    plain = frozenset(alias(column) for column in columns if _is_scalar(schema.field(column).type)) | extras
    compiled = {hole: Body(surveyed, places, plain) for hole, surveyed in bodies.items()}
    compiled_lines = {key: Line(surveyed, places, plain) for key, surveyed in lines.items()}
    files = Files(shop.files)
    part = _structure(settings, compiled, files, has_row_parts=bool(row_attached))
    fields = header_fields(message, compiled_lines, [("Content-Type", part.content_type), *part.fields])
    return Composer(
        columns=columns,
        fingerprint=_fingerprint(shop.sources, files.read),
        warnings=tuple(warnings),
        settings=settings,
        tokens=tokens,
        fields=fields,
        pieces=part.pieces,
        bodies=compiled,
        lines=compiled_lines,
        row_attachments=[(places[alias(one.column or "")], one) for one in row_attached],
        files=files,
        intakes=[(alias(column), intake_for(column, schema.field(column).type)) for column in columns],
        variables=shop.globals(),
        extras=extras,
        signers=_signers(settings, folder, fields),
        is_test=generation == "test",
    )


def _bare(schema: pa.Schema) -> pa.Schema:
    """The schema under the names readers of the list use: without byte-order marks, the first of two equal ones."""
    fields: dict[str, pa.Field] = {}
    for field in schema:
        fields.setdefault(bare_name(field.name), field)
    return pa.schema([field.with_name(name) for name, field in fields.items()])


def _survey_bodies(settings: Settings, shop: Workshop) -> tuple[dict[Hole, Surveyed], list[str]]:
    message = settings.message
    bodies: dict[Hole, Surveyed] = {}
    warnings: list[str] = []
    if message.text:
        bodies[Hole.TEXT] = shop.text_body(message.text)
    if message.html:
        bodies[Hole.HTML] = shop.html_body(message.html)
        if not message.text and message.text_from_html:
            source = text_template(shop.files.sources.get(message.html) or shop.sources[message.html])
            if source is not None:
                try:
                    bodies[Hole.TEXT] = shop.text_body(f"{message.html} as text", source)
                except TemplateError:
                    source = None
            if source is None:
                warnings.append(
                    f"{message.html}: the text part is made from the finished HTML of each row, which costs some "
                    "milliseconds a message; a text template of its own ([message] text) costs microseconds"
                )
    if not bodies:
        raise SettingsError(file="campaign.toml", problem="message: neither `text` nor `html` names a template")
    return bodies, warnings


def _survey_lines(settings: Settings, shop: Workshop) -> dict[str, Surveyed]:
    message = settings.message
    sources = {
        "subject": message.subject,
        "from_name": message.from_name,
        "to_name": message.to_name,
        "preheader": message.preheader,
        **{f"headers.{name}": value for name, value in message.headers.items()},
    }
    return {key: shop.line(f"message.{key}", source) for key, source in sources.items() if source is not None}


def _refuse_circles(lines: dict[str, Surveyed], extras: frozenset[str]) -> None:
    for key in ("subject", "preheader"):
        if key in lines:
            for name in ("subject", "preheader") if key == "subject" else ("preheader",):
                if name in lines[key].names and name in extras:
                    raise TemplateError(place=f"campaign.toml, message.{key}", problem=f"{key} cannot show {name}")


def _is_scalar(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_scalar(kind.value_type)
    return not pa.types.is_nested(kind)


def _structure(settings: Settings, bodies: dict[Hole, Body], files: Files, *, has_row_parts: bool) -> Part:
    message = settings.message
    key = hashlib.sha256(settings.campaign.id.encode()).hexdigest()[:20]
    part: Part | None = None
    if message.inline and not message.html:
        raise SettingsError(file="campaign.toml", problem="message.inline: there is no HTML that could show an image")
    if message.html:
        part = text_part(Hole.HTML)
        if message.inline:
            images = [files.inline(image) for image in message.inline]
            part = multipart("related", f"=_r{key}", [part, *images], more=' type="text/html";')
    if Hole.TEXT in bodies or (message.html and message.text_from_html):
        text = text_part(Hole.TEXT)
        part = text if part is None else multipart("alternative", f"=_a{key}", [text, part])
    assert part is not None
    fixed = [files.attached(one) for one in message.attachments if one.path]
    for one in message.attachments:
        if bool(one.path) == bool(one.column):
            raise SettingsError(file="campaign.toml", problem="message.attachments: give either `path` or `column`")
    if fixed or has_row_parts:
        part = multipart("mixed", f"=_m{key}", [part, *fixed], has_row_parts=has_row_parts)
    return part


def _signers(settings: Settings, folder: Path, fields: Sequence[Field]) -> list[tuple[Signer, SignatureTemplate]]:
    signers = []
    for number, table in enumerate(settings.dkim):
        if number and not table.also:
            continue
        signer = load_signer(table, folder)
        try:
            domain = domain_to_ascii(table.domain)
        except AddressError as problem:
            raise SettingsError(file="campaign.toml", problem=f"dkim.domain: {problem}") from None
        if not all(label.replace("-", "").replace("_", "").isalnum() for label in table.selector.split(".")):
            raise SettingsError(file="campaign.toml", problem=f"dkim.selector: {table.selector!r} is no DNS name")
        template = signature_template(
            domain=domain,
            selector=table.selector,
            algorithm=signer.algorithm,
            body_form=body_form(table),
            signed=signed_names(field.name for field in fields if field.is_made or field.value),
        )
        signers.append((signer, template))
    return signers


def _fingerprint(sources: dict[str, str], files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted({**{n: s.encode() for n, s in sources.items()}, **files}.items()):
        digest.update(f"{len(name.encode())}:{name}:{len(content)}:".encode() + content)
    return digest.hexdigest()
