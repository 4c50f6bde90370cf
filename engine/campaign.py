"""The campaign folder: where everything of one campaign lies, and who may read it.

    campaign.toml   settings            keys/       secrets, 0600
    templates/      what is sent        logs/       send logs, one file per worker process, never rewritten
    plan.json       what was decided    run/        locks of running senders
    control.sqlite  the control store   report/     what `merge-logs` wrote
    tokens.json     token -> campaign   suppression/, feedback/

The folder is made 0700 and files in it 0600: recipients' addresses are in there.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from engine.config import Settings, encode_custom, load_settings
from engine.errors import EngineError, Exit
from formats import plan as plan_format
from formats.plan import Plan, PlanError


class NoPlan(EngineError):
    """The campaign in {folder} has no plan yet."""

    exit_code = Exit.PLAN
    hint = "run `engine plan LIST.parquet --campaign {folder}`."


class PlanUnreadable(EngineError):
    """{file} cannot be read: {problem}."""

    exit_code = Exit.PLAN
    hint = "Restore the file, or plan again into a fresh campaign folder."


class Campaign:
    """Paths and the frozen parts of one campaign."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan_file = folder / "plan.json"
        self.store_file = folder / "control.sqlite"
        self.logs = folder / "logs"
        self.run = folder / "run"
        self.report = folder / "report"
        self.suppression = folder / "suppression"
        self.feedback = folder / "feedback"
        self.tokens_file = folder / "tokens.json"

    def settings(self) -> Settings:
        """The settings as the file has them now; raises SettingsError, NoCampaign."""
        return load_settings(self.folder)

    def plan(self) -> Plan:
        """The plan; raises NoPlan, PlanUnreadable."""
        return self.plan_and_fingerprint()[0]

    def plan_and_fingerprint(self) -> tuple[Plan, str]:
        """The plan, and the hash of its bytes that every log carries."""
        try:
            raw = self.plan_file.read_bytes()
        except FileNotFoundError:
            raise NoPlan(folder=self.folder) from None
        try:
            return plan_format.decode(raw), fingerprint(raw)
        except PlanError as problem:
            raise PlanUnreadable(file=self.plan_file, problem=problem) from None

    def log_files(self) -> list[Path]:
        """The send logs here, oldest name first."""
        return sorted(self.logs.glob("*.arrows"))


def fingerprint(*parts: bytes) -> str:
    """A short hash by which "the same" is told from "changed": 32 hex digits of SHA-256."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:32]


def frozen_fingerprint(settings: Settings) -> str:
    """The fingerprint of the settings that are frozen at `plan`: all but the live tables."""
    frozen = {
        name: value
        for name, value in msgspec.structs.asdict(settings).items()
        if name not in Settings.LIVE | {"control"}
    }
    return fingerprint(msgspec.json.Encoder(enc_hook=encode_custom, order="sorted").encode(frozen))


def make_private_folder(folder: Path) -> None:
    """The folder, 0700, with its parents; an existing one is left as it is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_whole(path: Path, raw: bytes) -> None:
    """`raw` as the file's whole content, or the old content where we die half way: written beside, synced, renamed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the folder's entries (a new name, a rename) survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
