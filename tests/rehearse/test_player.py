"""Providers played on loopback answer as their models say."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from engine.rehearse.models import Model, Outage, World
from engine.rehearse.player import Player, Report
from engine.rehearse.record import tally


class Client:
    """A lock-step SMTP client that notes the codes it is told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, place: tuple[str, int]) -> Client:
        return cls(*await asyncio.open_connection(*place))

    async def code(self) -> int:
        while (line := await self.reader.readline())[3:4] == b"-":
            pass
        return int(line[:3] or 0)

    async def say(self, *lines: str) -> list[int]:
        told = []
        for line in lines:
            self.writer.write(line.encode() + b"\r\n")
            told.append(await self.code())
        return told

    async def message(self, recipient: str) -> int:
        """The code that decides on one message."""
        *_, told = await self.say("MAIL FROM:<a@example.com>", f"RCPT TO:<{recipient}>")
        if told == 250:
            (told,) = await self.say("BDAT 7 LAST\r\nhello")  # and the line end
        elif told != 421:
            await self.say("RSET")
        return told

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


def play(model: Model, story, *, speed: float = 100.0, **more) -> Report:  # type: ignore[no-untyped-def]
    """Run the story against a world of one provider; its report."""

    async def run() -> Report:
        player = Player(World("one", (model,)), speed=speed, **more)
        places = await player.start()
        try:
            async with asyncio.timeout(10):
                await story(places[model.name])
        finally:
            await player.stop()
        return player.reports()[model.name]

    return asyncio.run(run())


QUICK = Model(name="quick", connect_s=0.0, message_s=0.0)


def test_connections_and_messages_per_connection() -> None:
    async def story(place: tuple[str, int]) -> None:
        first, second = await Client.connect(place), await Client.connect(place)
        assert await first.code() == await second.code() == 220
        third = await Client.connect(place)
        assert [await third.code(), await third.code()] == [421, 0]
        await third.close()
        await second.close()
        fourth = await Client.connect(place)
        assert await fourth.code() == 220
        await first.say("EHLO x")
        assert [await first.message(f"r{n}@example.org") for n in range(3)] == [250, 250, 421]
        assert await first.code() == 0
        await first.close()
        await fourth.close()

    report = play(msgspec.structs.replace(QUICK, connections=2, messages_per_connection=2), story)
    assert report.accepted == 2
    assert report.most_connections == 2
    assert report.answers["too_many_connections"] == 1
    assert report.answers["too_many_per_connection"] == 1


def test_a_rate_is_held_and_its_refusals_close() -> None:
    async def story(place: tuple[str, int]) -> None:
        for _ in range(5):
            client = await Client.connect(place)
            await client.code()
            await client.say("EHLO x")
            while await client.message("a@example.org") == 250:
                pass
            await client.close()
            await asyncio.sleep(0.1)  # a second of the model

    report = play(msgspec.structs.replace(QUICK, rate_per_s=4.0, burst_s=1.0), story, speed=10.0)
    assert report.answers["rate"] == 5
    # 4 at once, then 4 for each of four seconds, and what the sleeps took longer.
    assert 16 <= report.accepted <= 32


def test_greylisting_and_unknown_users_do_not_depend_on_the_order() -> None:
    recipients = [f"r{n}@example.org" for n in range(60)]
    model = msgspec.structs.replace(QUICK, greylist_share=0.3, greylist_s=60.0, unknown_share=0.2)
    told: list[dict[str, int]] = []

    async def one_pass(place: tuple[str, int], order: list[str]) -> None:
        client = await Client.connect(place)
        await client.code()
        await client.say("EHLO x")
        told.append({recipient: await client.message(recipient) for recipient in order})
        await client.close()

    async def story(place: tuple[str, int]) -> None:
        await one_pass(place, recipients)
        await asyncio.sleep(0.65)
        await one_pass(place, recipients)

    async def backwards(place: tuple[str, int]) -> None:
        await one_pass(place, recipients[::-1])

    play(model, story, seed=3)
    play(model, backwards, seed=3)
    first, second, third = told
    assert set(first.values()) == {250, 450, 550}
    assert first == third
    assert {code for recipient, code in second.items() if first[recipient] == 450} == {250}
    assert [r for r, code in first.items() if code == 550] == [r for r, code in second.items() if code == 550]


def test_outages_come_and_go() -> None:
    outages = (
        Outage("refuse", 0, 20),
        Outage("reject", 20, 40),
        Outage("slow", 40, 1000, factor=100.0),
    )
    took: list[float] = []

    async def story(place: tuple[str, int]) -> None:
        refused = await Client.connect(place)
        assert await refused.code() == 421
        await refused.close()
        await asyncio.sleep(0.22)
        client = await Client.connect(place)
        assert await client.code() == 220
        await client.say("EHLO x")
        assert await client.message("a@example.org") == 550
        await asyncio.sleep(0.2)
        began = asyncio.get_running_loop().time()
        assert await client.message("a@example.org") == 250
        took.append(asyncio.get_running_loop().time() - began)
        await client.close()

    play(Model(name="out", connect_s=0.0, message_s=0.1, outages=outages), story)
    assert took[0] >= 0.1


def test_silence_ends_with_the_connection() -> None:
    async def story(place: tuple[str, int]) -> None:
        client = await Client.connect(place)
        try:
            async with asyncio.timeout(0.1):
                await client.code()
        except TimeoutError:
            pass
        else:
            raise AssertionError("a silent server spoke")
        await client.close()

    report = play(msgspec.structs.replace(QUICK, outages=(Outage("silent", 0, 1000),)), story)
    assert report.answers == {"silent": 1}


def test_many_domains_have_their_limits_each_for_itself(tmp_path: Path) -> None:
    async def story(place: tuple[str, int]) -> None:
        clients = [await Client.connect(place) for _ in range(3)]
        for client in clients:
            assert await client.code() == 220
            await client.say("EHLO x")
        assert await clients[0].message("a@one.example") == 250
        assert await clients[1].message("a@two.example") == 250
        assert await clients[2].message("b@one.example") == 421
        for client in clients:
            await client.close()

    report = play(msgspec.structs.replace(QUICK, domains=2, connections=1), story, records=tmp_path)
    assert report.accepted == 2
    assert tally(tmp_path / "quick.tsv").recipients == 2
