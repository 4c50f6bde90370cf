"""The senders that `benchmarks/smtp.py` measures: each a process of its own that prints one line of JSON.

    python benchmarks/smtp_senders.py ours --port 2525 --messages 10000 --size 2048

Time and CPU are taken inside the process, from when all connections are open until the last message is answered:
starting Python, connecting and compiling templates are left out for everyone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import Callable, Coroutine
from email.message import EmailMessage
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

TEXT = "Dear {{ name }},\n\nthis week in {{ city }}: {{ offer }}.\n\n" + "It is a long text of plain words. " * 3 + "\n"
HTML_HEAD = "<html><body><p>Dear {{ name }},</p><p>this week in {{ city }}: <b>{{ offer }}</b>.</p>\n"
HTML_LINE = "<p>It is a long paragraph of plain words in a <i>newsletter</i> that many people read.</p>\n"


def fields(number: int) -> dict[str, str]:
    return {"name": f"Ann {number}", "city": f"Town {number % 977}", "offer": f"offer no. {number * 7919 % 100003}"}


def finished_message(number: int, size: int) -> bytes:
    """About `size` bytes, each one different."""
    head = (
        f"From: News <news@sender.test>\r\nTo: r{number}@rcpt.test\r\nSubject: No. {number}\r\n"
        f"Message-ID: <{number}.x@sender.test>\r\nDate: Mon, 1 Jun 2026 10:00:00 +0000\r\nMIME-Version: 1.0\r\n"
        "Content-Type: text/html; charset=utf-8\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\n"
    ).encode()
    line = b"<p>a line of a newsletter, as long as such lines are when they are encoded</p>=\r\n"
    return head + line * ((size - len(head)) // len(line) + 1)


class Measured:
    """What happened between `start` and `stop`."""

    def start(self) -> None:
        self._usage, self._at = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()

    def stop(self, messages: int, **more: object) -> dict[str, object]:
        usage, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - self._at
        return {
            "messages": messages,
            "wall_s": wall,
            "user_s": usage.ru_utime - self._usage.ru_utime,
            "system_s": usage.ru_stime - self._usage.ru_stime,
            **more,
        }


async def ours(options: argparse.Namespace) -> dict[str, object]:
    """The transport alone: a thousand finished messages, over and over."""
    from engine.clock import SystemClock
    from engine.smtp.destination import ConnectionLimits, Destination, Host
    from engine.smtp.dialogue import Accepted, Manner, Outgoing
    from engine.smtp.pool import Pool

    contents = [finished_message(number, options.size) for number in range(1000)]
    done = asyncio.get_running_loop().create_future()
    measured = Measured()

    class Slots:
        def acquire(self) -> bool:
            return True

        def release(self) -> None:
            pass

    class Sender:
        def __init__(self) -> None:
            self.next, self.open, self.accepted, self.running = 0, [], 0, False

        def on_ready(self, session) -> None:  # type: ignore[no-untyped-def]
            if not self.running:
                self.open.append(session)
                if len(self.open) == options.connections:
                    self.running = True
                    measured.start()
                    for each in self.open:
                        self.on_ready(each)
                return
            first, count = self.next, min(session.capacity, options.messages - self.next)
            if count > 0:
                self.next += count
                session.send(
                    [
                        Outgoing(n, f"v{n}@sender.test", f"r{n}@rcpt.test", contents[n % 1000], False, True)
                        for n in range(first, first + count)
                    ]
                )

        def on_events(self, session, events) -> None:  # type: ignore[no-untyped-def]
            for event in events:
                if type(event) is Accepted:
                    self.accepted += 1
                else:
                    done.set_exception(RuntimeError(str(event)))
            if self.accepted == options.messages:
                done.set_result(None)

        def on_session_ended(self, subject, why, stage, reply, error) -> None:  # type: ignore[no-untyped-def]
            if not done.done():
                done.set_exception(RuntimeError(f"{why} at {stage}: {reply or error}"))

    host = Host(name="127.0.0.1", port=options.port, implicit_tls=options.tls)
    destination = Destination(key="x", hosts=(host,), tls="required" if options.tls else "off")  # type: ignore[arg-type]
    limits = ConnectionLimits(
        messages_per_connection=10**9,
        manner=Manner(depth=options.depth, pipelining=not options.lock_step, chunking=options.chunking),
    )
    pool = Pool(destination, limits, Slots(), Sender(), SystemClock())
    pool.want(options.connections)
    await done
    result = measured.stop(options.messages)
    await pool.close(abort=True)
    return result


def _composer(size: int) -> Callable[[int], EmailMessage]:
    import jinja2

    environment = jinja2.Environment(autoescape=True)
    text = environment.from_string(TEXT)
    html = environment.from_string(HTML_HEAD + HTML_LINE * ((size - 800) // len(HTML_LINE)) + "</body></html>\n")

    def compose(number: int) -> EmailMessage:
        values = fields(number)
        message = EmailMessage()
        message["From"] = "News <news@sender.test>"
        message["To"] = f"r{number}@rcpt.test"
        message["Subject"] = f"No. {number}"
        message["Message-ID"] = f"<{number}.x@sender.test>"
        message["Date"] = "Mon, 1 Jun 2026 10:00:00 +0000"
        message["List-Unsubscribe"] = f"<https://sender.test/u/{number}>"
        message.set_content(text.render(values))
        message.add_alternative(html.render(values), subtype="html")
        return message

    return compose


async def aiosmtplib_naive(options: argparse.Namespace) -> dict[str, object]:
    """As most write it: a template, an EmailMessage and `send_message`, over connections that stay open."""
    import aiosmtplib

    compose = _composer(options.size)
    clients = [
        aiosmtplib.SMTP(hostname="127.0.0.1", port=options.port, local_hostname="c.test", start_tls=False)
        for _ in range(options.connections)
    ]
    for client in clients:
        await client.connect()
        await client.ehlo()
    numbers = iter(range(options.messages))

    async def work(client: aiosmtplib.SMTP) -> None:
        for number in numbers:
            await client.send_message(compose(number))

    measured = Measured()
    measured.start()
    await asyncio.gather(*(work(client) for client in clients))
    result = measured.stop(options.messages)
    for client in clients:
        client.close()
    return result


async def memory(options: argparse.Namespace) -> dict[str, object]:
    """What an open, idle connection costs in memory of the process, kernel buffers aside."""
    from engine.clock import SystemClock
    from engine.smtp.destination import ConnectionLimits, Destination, Host
    from engine.smtp.pool import Pool

    class Everything:
        def acquire(self) -> bool:
            return True

        release = on_ready = on_events = on_session_ended = lambda self, *rest: None

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    destination = Destination(key="x", hosts=(Host(name="127.0.0.1", port=options.port),), tls="off")  # type: ignore[arg-type]
    pool = Pool(destination, ConnectionLimits(), Everything(), Everything(), SystemClock())  # type: ignore[arg-type]
    pool.want(50)
    while pool.open < 50:
        await asyncio.sleep(0.05)
    before = resident()
    pool.want(options.connections)
    while pool.open < options.connections:
        await asyncio.sleep(0.05)
    each = (resident() - before) / (options.connections - 50)
    await pool.close(abort=True)
    return {"connections": options.connections, "resident_bytes_each": each}


SENDERS: dict[str, Callable[[argparse.Namespace], Coroutine[object, object, dict[str, object]]]] = {
    "ours": ours,
    "aiosmtplib": aiosmtplib_naive,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sender", choices=SENDERS)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--connections", type=int, default=50)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--chunking", action="store_true")
    parser.add_argument("--lock-step", action="store_true")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio")
    options = parser.parse_args()
    factory = None
    if options.loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        print(json.dumps(runner.run(SENDERS[options.sender](options))))


if __name__ == "__main__":
    main()
