"""The keys behind Message-IDs, return paths and unsubscribe tokens, and the token table beside the campaign.

The file holds one key a line, `<id> <64 hex digits>`: id of two lower-case letters or digits, 32 bytes of key. The last
line is the current key; older ones stay, so that old tokens still read. Lines that begin with `#` are comments.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

import msgspec

from engine.errors import EngineError, Exit
from formats.verp import KEY_ID, TokenOrigin, TokenTable, decode_table, encode_table

TOKENS_FILE = "tokens.json"
_COMMENT = (
    "# Rowpost keys: whoever reads this file can forge unsubscribes and bounces. Back it up; tokens die with it.\n"
)


class KeysError(EngineError):
    """{file}: {problem}."""

    exit_code = Exit.KEYS
    hint = (
        "Restore {file} from a backup: without its key the tokens of messages already sent cannot be checked. "
        "`engine init` makes a new one for a new campaign."
    )


class KeyRing(msgspec.Struct, frozen=True):
    """Several keys by id; `current_id` makes new tokens, all of them read old ones."""

    current_id: str
    keys: dict[str, bytes]
    file: str = "keys"

    def __repr__(self) -> str:
        return f"KeyRing(current_id={self.current_id!r}, ids={sorted(self.keys)})"  # never the keys themselves

    def key(self, key_id: str | None = None) -> bytes:
        """The key named `key_id` (default: the current one); raises KeysError where it is lost."""
        wanted = self.current_id if key_id is None else key_id
        try:
            return self.keys[wanted]
        except KeyError:
            raise KeysError(
                file=self.file,
                problem=f"key {wanted!r} that the plan was made with is missing (it has {sorted(self.keys)})",
            ) from None


def load_keys(path: Path) -> KeyRing:
    """The ring in the file; raises KeysError naming file, line and problem."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise KeysError(file=path, problem="the key file is missing") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise KeysError(file=path, problem=f"cannot be read: {problem}") from None
    keys: dict[str, bytes] = {}
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not KEY_ID.match(words[0]) or len(words[1]) != 64:
            raise KeysError(file=path, problem=f"line {number} is not `<two letters or digits> <64 hex digits>`")
        if words[0] in keys:
            raise KeysError(file=path, problem=f"line {number} names key {words[0]!r} a second time")
        try:
            keys[words[0]] = bytes.fromhex(words[1])
        except ValueError:
            raise KeysError(file=path, problem=f"line {number}: the key is not hexadecimal") from None
        current = words[0]
    if not keys:
        raise KeysError(file=path, problem="the key file holds no key")
    return KeyRing(current, keys, str(path))


def write_new_keys(path: Path) -> KeyRing:
    """Makes a file with one new key, mode 0600, in a folder of mode 0700; never overwrites (KeysError)."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = secrets.token_bytes(32)
    write_secret(path, f"{_COMMENT}k1 {key.hex()}\n".encode())
    return KeyRing("k1", {"k1": key}, str(path))


def write_secret(path: Path, content: bytes) -> None:
    """A new file that only its owner reads, durable before this returns; raises KeysError where one exists."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise KeysError(file=path, problem="the file exists; keys are never overwritten") from None
    except OSError as problem:
        raise KeysError(file=path, problem=f"cannot be written: {problem.strerror}") from None
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def rotate_keys(path: Path) -> KeyRing:
    """Adds a new key, current from now on; a plan made before goes on with its own."""
    ring = load_keys(path)
    number = next(n for n in range(1, 1296) if _key_name(n) not in ring.keys)
    key_id, key = _key_name(number), secrets.token_bytes(32)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{key_id} {key.hex()}\n")
        file.flush()
        os.fsync(file.fileno())
    return KeyRing(key_id, {**ring.keys, key_id: key}, str(path))


def _key_name(number: int) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    return f"k{number}" if number < 10 else digits[number // 36 % 36] + digits[number % 36]


def read_token_table(folder: Path) -> TokenTable:
    """The table in the campaign folder; empty where there is none; raises KeysError where it is damaged."""
    path = folder / TOKENS_FILE
    try:
        return decode_table(path.read_bytes())
    except FileNotFoundError:
        return TokenTable()
    except (OSError, ValueError) as problem:
        raise KeysError(file=path, problem=str(problem)) from None


def write_token_table(folder: Path, origin: TokenOrigin) -> TokenTable:
    """Adds the campaign to the table, by a rename in the same folder: a reader sees the old or the new table."""
    table = read_token_table(folder).with_campaign(origin)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".tokens-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(encode_table(table))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # nothing secret stands in it
        os.replace(temporary, folder / TOKENS_FILE)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return table
