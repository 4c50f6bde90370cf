"""Every script, byte by byte against the core; the words of the dialogue do not depend on how bytes are cut."""

from __future__ import annotations

import pytest

from engine.smtp.dialogue import Dialogue, Event
from tests.smtp.dialogue_script import Script, message, scripts, spell

SCRIPTS = scripts()


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 20


class Player:
    """Plays a script against a dialogue; `chunk` bytes of the server's text at a time."""

    def __init__(self, script: Script, chunk: int | None) -> None:
        self.script = script
        self.chunk = chunk
        self.dialogue = Dialogue(script.parsed_offer, script.manner, chunking_proven=script.proven)
        self.written = b""
        self.events: list[Event] = []

    def pull(self) -> None:
        while data := self.dialogue.pull():
            self.written += data

    def play(self) -> None:
        for step in self.script.steps:
            where = f"{self.script.name}.txt:{step.number}"
            if step.kind != "event":
                assert not self.events, f"{where}: before it {[spell(event) for event in self.events]}"
            match step.kind:
                case "send":
                    self.events += self.dialogue.take([message(step)])
                    # A batch is handed in whole before anything is written.
                case "close":
                    self.dialogue.finish()
                case "C":
                    self.pull()
                    line, _, self.written = self.written.partition(b"\r\n")
                    assert line.decode() == step.text, where
                case "S":
                    self.pull()
                    assert self.written == b"", f"{where}: written before the reply"
                    raw = step.text.encode()
                    for start in range(0, len(raw), self.chunk or len(raw)):
                        self.events += self.dialogue.receive(raw[start : start + (self.chunk or len(raw))])
                        if self.chunk:
                            self.pull()
                case "hang up":
                    self.pull()
                    assert self.written == b"", where
                    self.events += self.dialogue.lose("connection lost", by_peer=True)
                case "no reply in time":
                    self.pull()
                    self.events += self.dialogue.lose(self.dialogue.expire())
                case "over":
                    assert self.dialogue.is_over, where
                    self.events += self.dialogue.lose(self.dialogue.why)
                case "event":
                    assert self.events, f"{where}: no such event"
                    assert spell(self.events.pop(0)) == step.text, where
        self.pull()
        assert self.written == b""
        assert self.events == []
        assert self.dialogue.in_hand == 0, "the script leaves messages without an event"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script_in_whole_reads(script: Script) -> None:
    Player(script, None).play()


@pytest.mark.parametrize("script", [s for s in SCRIPTS if "burst" not in s.name], ids=lambda script: script.name)
def test_script_byte_by_byte(script: Script) -> None:
    Player(script, 1).play()
