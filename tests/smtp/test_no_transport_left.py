"""A handshake that comes to nothing leaves no transport behind, and no socket closed under one.

A descriptor that is closed while the loop still watches it is given to the next connection, which is then deaf.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import msgspec
import pytest

from engine.smtp.destination import Destination
from engine.smtp.handshake import Failure, establish
from tests.smtp.conftest import QUICK, serving


def watched() -> set[int]:
    """Descriptors that the running loop watches."""
    return set(asyncio.get_running_loop()._selector.get_map())  # type: ignore[attr-defined]


@pytest.mark.parametrize("first", [b"554 5.3.2 no\r\n", b"garbage\r\n", b""], ids=["refused", "garbage", "silent"])
@pytest.mark.parametrize("implicit_tls", [False, True], ids=["plain", "tls"])
def test_a_failed_handshake_leaves_nothing_watched(
    certificate: tuple[Path, Path], first: bytes, implicit_tls: bool
) -> None:
    options: dict[str, object] = {}
    if implicit_tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        options["ssl"] = context

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        await asyncio.sleep(30)  # and keeps its end open: nothing of ours may wait for it to close

    async def story() -> None:
        async with serving(refuse, **options) as host:
            host = msgspec.structs.replace(host, implicit_tls=implicit_tls)
            destination = Destination(key="x", hosts=(host,), tls="required" if implicit_tls else "off")  # type: ignore[arg-type]
            before = watched()
            limits = msgspec.structs.replace(QUICK, handshake_timeout_s=3.0 if first else 0.3)
            assert isinstance(await establish(destination, host, limits), Failure)
            for _ in range(5):
                await asyncio.sleep(0)
            ours = [
                transport
                for fd in watched() - before
                if (key := asyncio.get_running_loop()._selector.get_map().get(fd)) is not None  # type: ignore[attr-defined]
                for handle in key.data
                if handle is not None
                for transport in [handle._callback.__self__]
                if "127.0.0.1" in str(transport.get_extra_info("peername"))
                and transport.get_extra_info("peername")[1] == host.port
            ]
            assert ours == []

    asyncio.run(story())
