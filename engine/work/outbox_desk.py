"""What `engine serve-outbox` has in place of a supervisor: ledger, throttle and budgets for its one worker.

Speaks to the worker over a channel, as a supervisor does, though both live in one process and one loop.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
from collections.abc import Callable

import msgspec

from engine.campaign import Campaign, make_private_folder
from engine.clock import Clock
from engine.config import Settings, encode_custom, load_settings
from engine.errors import Exit
from engine.host import boot_id, host_id
from engine.pace import slots
from engine.pace.budgets import Budgets, load_budgets
from engine.work.channel import Channel
from engine.work.messages import (
    Allow,
    Down,
    Drain,
    Goodbye,
    Grant,
    Live,
    Pulse,
    Released,
    Revoke,
    Stopped,
    Told,
    Unused,
    Up,
)
from engine.work.outbox import OutboxWorker
from engine.work.pacing import Pacing
from engine.work.routing import budgets_file
from engine.work.sent_before import DAY_US, sent_before
from engine.work.worker import WorkerStart

_SEAT = 0
_TICK_S = 0.05


class Desk:
    """One run of `engine serve-outbox`."""

    def __init__(
        self,
        home: Campaign,
        settings: Settings,
        sender: str,
        clock: Clock,
        say: Callable[..., None],
        *,
        relay: str | None = None,
    ) -> None:
        self._home, self._clock, self._say = home, clock, say
        self.settings = settings
        self._start = WorkerStart(
            folder=str(home.folder.resolve()),
            plan_fingerprint="outbox",
            incarnation=secrets.token_hex(8),
            sender=sender,
            host_id=host_id(),
            boot_id=boot_id(),
            worker=_SEAT,
            number=1,
            seed=random.SystemRandom().getrandbits(63),
            relay=relay,
            outbox=str(home.folder.resolve()),
        )
        make_private_folder(home.run)
        memory = home.run / "throttle-outbox.json"
        self._pacing = Pacing(settings, self._budgets(settings), memory, clock, say, self._tell)
        if self._pacing.is_rated:
            since_us = clock.wall_us() - DAY_US
            self._pacing.sent_before(sent_before(home.log_files(), since_us, self._start.host_id))
        self._channel: Channel[Up] | None = None
        self._stopped: Stopped | None = None
        self.accepted = self.bounced = self.in_doubt = 0

    def _budgets(self, settings: Settings) -> Budgets | None:
        return load_budgets(budgets_file(self._home.folder)) if settings.delivery.mode == "direct" else None

    async def run(self) -> Exit:
        """Serve until `drain` is called or something ends the run."""
        ours, theirs = socket.socketpair()
        up: Channel[Up] = Channel(ours, Up)
        down: Channel[Down] = Channel(theirs, Down)
        await up.open()
        await down.open()
        self._channel = up
        worker = OutboxWorker(self._start, down)
        pacing = asyncio.create_task(self._pace())
        listening = asyncio.create_task(self._listen(up))
        try:
            await worker.run()
            await listening
        finally:
            pacing.cancel()
            up.close()
            self._pacing.save()
        return Exit(self._stopped.exit_code) if self._stopped is not None else Exit.DONE

    @property
    def stopped(self) -> Stopped | None:
        """Why the worker stopped by itself, where it did."""
        return self._stopped

    def drain(self, reason: str) -> None:
        """No new attempts; what is in flight finishes, the rest goes back to the table."""
        self._say("draining", reason=reason)
        self._tell(Drain(), None)

    def reload(self) -> None:
        """Read the live settings again; raises SettingsError."""
        settings = load_settings(self._home.folder)
        self.settings = settings
        encode = msgspec.json.Encoder(enc_hook=encode_custom).encode
        self._pacing.budgets_changed(settings, self._budgets(settings))
        self._tell(Live(delivery=encode(settings.delivery), retry=encode(settings.retry)), None)
        self._say("settings_read")

    def _tell(self, message: msgspec.Struct, worker: int | None) -> None:
        if self._channel is not None:
            self._channel.send(message)

    async def _listen(self, up: Channel[Up]) -> None:
        async for message in up.messages():
            now = self._clock.monotonic()
            match message:
                case Pulse():
                    self._pulse(message, now)
                case Released():
                    self._pacing.ledger.closed(_SEAT, message.key, message.connections, now)
                case Unused():
                    self._pacing.ledger.unused(_SEAT, message.key, message.messages, now)
                case Told():
                    self._say(message.event, **message.fields)
                case Stopped():
                    self._stopped = self._stopped or message
                case Goodbye():
                    return
                case _:
                    pass

    def _pulse(self, pulse: Pulse, now: float) -> None:
        for count in pulse.providers:
            self.accepted += count.accepted
            self.bounced += count.rejected
            self.in_doubt += count.in_doubt
        self._pacing.demand(_SEAT, dict(pulse.demand), now, dict(pulse.urgent))
        for key, messages, at in pulse.spent:
            self._pacing.ledger.spent(_SEAT, key, messages, at, now)
        self._pacing.hear(pulse.seen)
        self._hand_out(now)

    async def _pace(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._hand_out(self._clock.monotonic())

    def _hand_out(self, now: float) -> None:
        for decision in self._pacing.tick(now):
            match decision:
                case slots.Grant():
                    self._tell(Grant(key=decision.key, connections=decision.connections), None)
                case slots.Revoke():
                    self._tell(Revoke(key=decision.key, connections=decision.connections), None)
                case slots.Allow():
                    self._tell(Allow(key=decision.key, messages=decision.messages, valid_s=decision.valid_s), None)
