"""A row becomes a message: envelope and content.

    composer = build_composer(settings, folder, schema)
    message = composer.compose(row, mailbox, values, now_us)

Here the parts are put together: templates surveyed and checked against the list's columns, header fields, the body's
structure, keys. What runs once a message is `composer.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

import pyarrow as pa

from engine.compose.composer import Composer, Draft, Message, Row, RowProblem
from engine.compose.fields import Field, check_unsubscribe_url, header_fields
from engine.compose.htmltext import text_template
from engine.compose.keys import load_keys
from engine.compose.mime import Files, Hole, Part, multipart, text_part
from engine.compose.sandbox import alias
from engine.compose.sign import Signer, body_form, load_signer
from engine.compose.template import EXTRAS, Body, Line, Surveyed, TemplateError, Workshop
from engine.compose.values import intake_for
from engine.config import Settings, SettingsError
from formats.address import AddressError, domain_to_ascii
from formats.dkim import SignatureTemplate, signature_template, signed_names
from formats.recipients import bare_name
from formats.verp import TokenMaker

__all__ = ["Composer", "Draft", "Message", "Row", "RowProblem", "TemplateError", "build_composer"]


def build_composer(
    settings: Settings,
    folder: Path,
    schema: pa.Schema,
    *,
    generation: Literal["live", "test"] = "live",
    key_id: str | None = None,
    selectors: Collection[str] = (),
) -> Composer:
    """The campaign's composer. `key_id` is the plan's; without one the ring's current key is used. `selectors` are
    those that sources sign with in place of the first [[dkim]].

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
        by_selector={selector: _signers(settings, folder, fields, selector) for selector in sorted(set(selectors))},
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


def _signers(
    settings: Settings, folder: Path, fields: Sequence[Field], selector: str | None = None
) -> list[tuple[Signer, SignatureTemplate]]:
    """The first [[dkim]], or the one with the selector in its place, and those that sign as well."""
    first = 0
    if selector is not None:
        first = next((number for number, table in enumerate(settings.dkim) if table.selector == selector), -1)
        if first < 0:
            problem = f"a source's dkim_selector is {selector!r}, and no [[dkim]] has that selector"
            raise SettingsError(file="budgets.toml", problem=problem)
    signers = []
    for number, table in enumerate(settings.dkim):
        if number != first and not table.also:
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
