"""From an outbox row to a message: a template of the folder with the row's fields, or what the application composed.

A template is `templates/NAME.toml`: keys of `[message]` (subject, text, html, from_name, headers, ...) that stand over
those of campaign.toml for this kind of mail. Its files may be edited while the server runs; they are looked at again
every two seconds. The composers are those of campaigns: one is compiled for each template and set of fields, and kept.
"""

from __future__ import annotations

import tomllib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import pyarrow as pa

from engine.campaign import make_private_folder
from engine.clock import Clock
from engine.compose.render import Composer, Message, RowProblem, build_composer
from engine.config import Attachment, MessageTable, Settings
from engine.control.outbox import Claimed
from engine.errors import EngineError
from formats.address import Mailbox

_KEPT = 200  # composers: templates times the sets of fields they are used with
_LOOK_S = 2.0
_PLAIN = "run/composed"
ATTACHMENTS = "attachments"


class Letter(msgspec.Struct, frozen=True):
    """What a claimed row says, read: its fields by name, and what its composer depends on."""

    claimed: Claimed
    fields: dict[str, Any]
    headers: dict[str, str]
    attachments: tuple[str, ...]


def read_letter(claimed: Claimed) -> Letter:
    """The row's JSON read; raises RowProblem naming the column that does not fit."""

    def decode(name: str, raw: str, kind: Any) -> Any:
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
            raise RowProblem("render", f"{name}: {problem}") from None

    return Letter(
        claimed,
        decode("fields", claimed.fields, dict[str, Any]),
        decode("headers", claimed.headers, dict[str, str]),
        decode("attachments", claimed.attachments, tuple[str, ...]),
    )


class LetterComposer:
    """Composes outbox rows. Belongs to one thread. What it raises of a row is a RowProblem."""

    def __init__(self, settings: Settings, folder: Path, clock: Clock, selectors: Collection[str] = ()) -> None:
        """`selectors` are those of the sources. One without a [[dkim]] here signs as the first: a sign-up mail that is
        signed by another key of ours is better than none.
        """
        self._settings, self._folder, self._clock = settings, folder, clock
        self._selectors = {table.selector for table in settings.dkim} & set(selectors)
        self._composers: OrderedDict[tuple[object, ...], Composer] = OrderedDict()
        self._stamps: dict[str, tuple[float, object]] = {}  # template -> looked at when, what it was
        # What applications compose goes through the same compiler, as templates that are one field each.
        plain = folder / _PLAIN
        make_private_folder(plain)
        (plain / "text.txt").write_text("{{ text }}", "utf-8")
        (plain / "page.html").write_text("{{ html|safe }}", "utf-8")

    def compose(
        self, row: int, mailbox: Mailbox, values: Sequence[object], now_us: int, selector: str | None = None
    ) -> Message:
        """The message of a row whose only value is its Letter, signed as its source does; raises RowProblem."""
        (letter,) = values
        assert isinstance(letter, Letter)
        fields = self._fields(letter)
        composer = self._composer(letter, fields)
        chosen = selector if selector in self._selectors else None
        return composer.compose(row, mailbox, [fields.get(column) for column in composer.columns], now_us, chosen)

    def _fields(self, letter: Letter) -> dict[str, Any]:
        claimed = letter.claimed
        fields = letter.fields
        if claimed.template is None:
            fields = {"subject_line": claimed.subject, "text": claimed.text, "html": claimed.html}
        extra = {f"header_field_{n}": value for n, value in enumerate(letter.headers.values())}
        files = {f"attached_file_{n}": _attachment(path) for n, path in enumerate(letter.attachments)}
        return {**fields, **extra, **files}

    def _composer(self, letter: Letter, fields: dict[str, Any]) -> Composer:
        claimed = letter.claimed
        stamp = self._stamp(claimed.template) if claimed.template is not None else None
        schema = _schema(fields)
        shape = tuple((field.name, str(field.type)) for field in schema)
        html_or_text = (claimed.text is not None, claimed.html is not None)
        key = (claimed.template, stamp, shape, tuple(letter.headers), html_or_text)
        found = self._composers.get(key)
        if found is None:
            found = self._composers[key] = self._build(letter, schema)
            if len(self._composers) > _KEPT:
                self._composers.popitem(last=False)
        self._composers.move_to_end(key)
        return found

    def _build(self, letter: Letter, schema: pa.Schema) -> Composer:
        try:
            settings = msgspec.structs.replace(self._settings, message=self._message(letter))
            return build_composer(settings, self._folder, schema, selectors=self._selectors)
        except EngineError as problem:
            said = str(problem).replace("the list has no column", "the mail has no field")
            raise RowProblem("render", said) from None

    def _message(self, letter: Letter) -> MessageTable:
        claimed, message = letter.claimed, self._settings.message
        if claimed.template is not None:
            message = read_template(self._folder, claimed.template, message)
        else:
            message = msgspec.structs.replace(
                message,
                subject="{{ subject_line }}",
                text=f"{_PLAIN}/text.txt" if claimed.text is not None else None,
                html=f"{_PLAIN}/page.html" if claimed.html is not None else None,
                preheader=None,
                inline=(),
                attachments=(),
            )
        headers = {name: f"{{{{ header_field_{n} }}}}" for n, name in enumerate(letter.headers)}
        files = tuple(Attachment(column=f"attached_file_{n}") for n in range(len(letter.attachments)))
        return msgspec.structs.replace(
            message, headers={**message.headers, **headers}, attachments=(*message.attachments, *files)
        )

    def _stamp(self, name: str) -> object:
        """What changes when one of the template's files does."""
        now = self._clock.monotonic()
        known = self._stamps.get(name)
        if known is not None and now - known[0] < _LOOK_S:
            return known[1]
        folder = self._folder / "templates"
        stamp = tuple(
            sorted((path.name, path.stat().st_mtime_ns) for path in folder.glob("**/*") if path.is_file())
            if folder.is_dir()
            else ()
        )
        self._stamps[name] = (now, hash(stamp))
        return hash(stamp)


def _attachment(path: str) -> str:
    """A file below attachments/, and nowhere else: whoever may write mails must not read keys."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts:
        raise RowProblem("render", f"attachment {path!r}: a path below the folder attachments/ is expected")
    return str(PurePosixPath(ATTACHMENTS, *parts))


def read_template(folder: Path, name: str, message: MessageTable) -> MessageTable:
    """`[message]` with the template's own keys over it; raises RowProblem where there is none or it is wrong."""
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or name.startswith("."):
        raise RowProblem("render", f"{name!r} is no template's name: letters, digits, '-', '_' and '.'")
    path = folder / "templates" / f"{name}.toml"
    try:
        own = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        there = sorted(file.stem for file in path.parent.glob("*.toml"))
        raise RowProblem(
            "render", f"there is no template {name!r}; there is {', '.join(there) or 'none at all'}"
        ) from None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise RowProblem("render", f"{path.name}: {problem}") from None
    if "text" in own or "html" in own:
        own = {"text": None, "html": None, **own}
    try:
        return msgspec.convert({**msgspec.to_builtins(message), **own}, MessageTable)
    except msgspec.ValidationError as problem:
        raise RowProblem("render", f"{path.name}: {problem}") from None


def _schema(fields: dict[str, Any]) -> pa.Schema:
    """The columns these fields would be in a list. Null is text: the empty string."""
    kinds: list[tuple[str, pa.DataType]] = []
    for name, value in fields.items():
        if value is None or isinstance(value, str):
            kind = pa.string()
        else:
            try:
                kind = pa.array([value]).type
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as problem:
                raise RowProblem("render", f"field {name!r}: {problem}") from None
        kinds.append((name, kind))
    return pa.schema(kinds)
