"""Providers played on loopback: a sink for each, which answers as its model says (`engine.rehearse.models`).

Each provider of a world listens on a port of its own; whoever connects there meets its limits on connections, rate and
messages per connection, its greylisting, unknown users, blocks, outages and slow replies. Sources are told apart by
the address they connect from. Time can be compressed: at speed 60 a minute of the models passes in a second, for rates
and waits alike; a world then needs 60 times the messages a second, which is what bounds the speed.

    player = Player(load_world("mixed"), speed=10)
    places = await player.start()            # {"bigmail": ("127.0.0.1", 40123), ...}
    ...
    await player.stop()
    player.reports()["bigmail"].accepted

A model's time for a transaction is spent before the reply to the content. Half of its time for a connection is spent
before the greeting and the rest before the first reply to a content, for the TLS handshake lies between. What this
machine needs for handshakes and round trips is part of these times, not added to them, or compressed time would
stretch it. Refusals come at RCPT, except for policy (to the content) and silence (to the content). Chance is drawn from
the seed and the recipient's address, so that a run with another sender meets the same unknown users.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from engine.clock import Clock, SystemClock
from engine.rehearse.conversation import Conversation
from engine.rehearse.models import Answer, Model, Played, World
from engine.rehearse.models import Kind as AnswerKind
from engine.rehearse.sink import Sink, SinkSettings
from engine.rehearse.steering import Act, Kind, Phase
from formats.reply import Reply

# Real seconds: whoever is back so soon was there in time, for a transaction's round trips are in the model's time.
_ROUND_TRIP_S = 0.1


class FromSource(msgspec.Struct):
    """What came from one source address, counted where it arrived. Refused connections count while they are open."""

    open: int = 0
    most_connections: int = 0
    accepted: int = 0


class Report(msgspec.Struct):
    """What one provider has seen. Times are seconds of the models since the player started."""

    now_s: float = 0.0  # when the report was made
    first_opened_s: float | None = None  # the first connection
    accepted: int = 0
    answers: dict[str, int] = {}  # by kind, refusals and refused connections included
    most_connections: int = 0  # of one source at one time
    first_accepted_s: float | None = None
    last_accepted_s: float | None = None
    late_s: float = 0.0  # by how much connections came late to their first transaction, summed over all of them
    sources: dict[str, FromSource] = {}


class Player:
    """A world on loopback."""

    def __init__(
        self,
        world: World,
        *,
        settings: SinkSettings | None = None,
        speed: float = 1.0,
        seed: int = 0,
        bound_s: float | None = None,
        records: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`settings` say what EHLO offers and whether TLS is; `bound_s` turns the models' shares of a campaign into
        seconds; `records` is a folder for a record of each provider."""
        self.speed = speed
        self.clock = clock or SystemClock()
        self._began = 0.0
        base = msgspec.structs.replace(settings or SinkSettings(), steered=False)
        if records is not None:
            records.mkdir(parents=True, exist_ok=True)
        self.providers = {
            model.name: PlayedProvider(
                self,
                model,
                msgspec.structs.replace(
                    base,
                    hostname=f"mx.{model.name}.test",
                    record=records / f"{model.name}.tsv" if records is not None else None,
                ),
                seed,
                bound_s,
            )
            for model in world.provider
        }

    def now(self) -> float:
        """Seconds of the models since the start."""
        return (self.clock.monotonic() - self._began) * self.speed

    async def start(self, host: str = "127.0.0.1") -> dict[str, tuple[str, int]]:
        """Listen; returns where each provider does. The models' time begins now. Raises SinkCannotListen."""
        places = {name: await provider.start(host) for name, provider in self.providers.items()}
        self._began = self.clock.monotonic()
        return places

    async def start_at(self, addresses: Mapping[str, str], port: int = 0) -> dict[str, tuple[str, int]]:
        """Listen at an address for each provider, all on one port; 0 takes the first one's free port for all.

        Raises SinkCannotListen; then `stop` and try again.
        """
        places: dict[str, tuple[str, int]] = {}
        for name, provider in self.providers.items():
            places[name] = await provider.start(addresses[name], port)
            port = places[name][1]
        self._began = self.clock.monotonic()
        return places

    async def stop(self) -> None:
        """Close everything."""
        for provider in self.providers.values():
            await provider.stop()

    def reports(self) -> dict[str, Report]:
        """What each provider has seen so far."""
        return {name: provider.report() for name, provider in self.providers.items()}


class PlayedProvider(Sink):
    """One provider: a sink whose answers come from its model."""

    def __init__(self, player: Player, model: Model, settings: SinkSettings, seed: int, bound_s: float | None) -> None:
        super().__init__(settings, clock=player.clock)
        self._player = player
        self._model = model
        self._seed = seed
        self._bound_s = bound_s
        self._report = Report()
        # A model of many domains is played once a domain, from the first recipient there.
        self._played: dict[str, Played] = {}
        self._admitted: dict[Conversation, Played] = {}
        self._busy_until: dict[Conversation, float] = {}  # seconds of the models

    def report(self) -> Report:
        """What it has seen so far."""
        most = max((played.most_connections for played in self._played.values()), default=0)
        return msgspec.structs.replace(
            self._report, now_s=self._player.now(), most_connections=most, answers=dict(self._report.answers)
        )

    def opened(self, conversation: Conversation) -> Act | Reply:
        """The greeting, late, or a refusal."""
        if self._report.first_opened_s is None:
            self._report.first_opened_s = self._player.now()
        source = self._report.sources.setdefault(conversation.peer, FromSource())
        source.open += 1
        source.most_connections = max(source.most_connections, source.open)
        usual = super().opened(conversation)
        if isinstance(usual, Reply) and usual.code >= 400:
            return usual
        answer = self._admit(conversation, "") if self._model.domains == 1 else None
        if answer is None or answer.kind is AnswerKind.ACCEPTED:
            self._busy_until[conversation] = self._player.now() + self._model.connect_s
            seconds = self._model.connect_s / 2 / self._player.speed
            return Act(Kind.SLOW, Phase.RCPT, None, seconds) if seconds > 0 else usual
        return self._act(answer, answer.takes_s, Phase.RCPT)

    def closed(self, conversation: Conversation) -> None:
        """The connection's place is free."""
        if conversation in self._conversations:
            self._report.sources[conversation.peer].open -= 1
        super().closed(conversation)
        self._busy_until.pop(conversation, None)
        played = self._admitted.pop(conversation, None)
        if played is not None:
            played.disconnect(conversation.peer)

    def rcpt(self, conversation: Conversation, recipient: bytes) -> Act | None:
        """The model's word on one transaction."""
        domain = recipient.rpartition(b"@")[2].decode("ascii", "replace").lower() if self._model.domains > 1 else ""
        if conversation not in self._admitted:
            admission = self._admit(conversation, domain)
            if admission.kind is not AnswerKind.ACCEPTED:
                return self._act(admission, admission.takes_s, Phase.RCPT)
        now = self._player.now()
        answer = self._of(domain).message(conversation.peer, zlib.crc32(recipient), conversation.messages, now)
        self._count(answer)
        due_s = self._due(conversation, answer.takes_s, now)
        if answer.kind is AnswerKind.ACCEPTED:
            return None  # `judge` waits for it
        # Policy is judged by the content, and whoever says nothing says nothing to it.
        late = answer.kind in (AnswerKind.REFUSED, AnswerKind.SILENT)
        return self._act(answer, due_s - now, Phase.DOT if late else Phase.RCPT)

    def judge(self, conversation: Conversation, content: bytes) -> Act | None:
        """The content has ended, and is answered when the transaction's time is over."""
        seconds = (self._busy_until.get(conversation, 0.0) - self._player.now()) / self._player.speed
        usual = super().judge(conversation, content)
        return usual if usual is not None or seconds <= 0 else Act(Kind.SLOW, Phase.DOT, None, seconds)

    def take(self, conversation: Conversation, content: bytes, answer: bytes) -> None:
        """Record the content, and when it was accepted."""
        super().take(conversation, content, answer)
        now = max(self._player.now(), self._busy_until.get(conversation, 0.0))
        if self._report.first_accepted_s is None:
            self._report.first_accepted_s = now
        self._report.last_accepted_s = now
        self._report.accepted += len(conversation.recipients)
        self._report.sources[conversation.peer].accepted += len(conversation.recipients)

    def _admit(self, conversation: Conversation, domain: str) -> Answer:
        played = self._of(domain)
        answer = played.connect(conversation.peer, self._player.now())
        if answer.kind is AnswerKind.ACCEPTED:
            self._admitted[conversation] = played
        else:
            self._count(answer)
        return answer

    def _of(self, domain: str) -> Played:
        played = self._played.get(domain)
        if played is None:
            played = self._played[domain] = Played(self._model, self._seed, self._bound_s)
        return played

    def _count(self, answer: Answer) -> None:
        self._report.answers[answer.kind] = self._report.answers.get(answer.kind, 0) + 1

    def _due(self, conversation: Conversation, takes_s: float, now: float) -> float:
        """When a transaction that takes so long is over; the next one begins then."""
        before = self._busy_until.get(conversation, 0.0)
        if not conversation.messages and before:
            self._report.late_s += max(0.0, now - before)
        is_back = now - before < _ROUND_TRIP_S * self._player.speed
        due_s = self._busy_until[conversation] = (before if is_back else now) + takes_s
        return due_s

    def _act(self, answer: Answer, takes_s: float, phase: Phase) -> Act:
        """A refusal, or silence."""
        if answer.kind is AnswerKind.SILENT:
            return Act(Kind.NEVER, phase)
        seconds = max(0.0, takes_s) / self._player.speed
        code, _, text = answer.reply.partition(" ")
        return Act(Kind.REPLY, phase, Reply(int(code), text), seconds, closes=answer.closes)
