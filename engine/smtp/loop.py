"""Which event loop a sending process runs on: measured, not believed.

`benchmarks/smtp.py --only transport --only tls`, medians of five on a 2-core AMD EPYC, messages per CPU second of
uvloop over asyncio: plain text 0.98 to 1.08 (no difference beyond the noise), TLS with PIPELINING 1.16 to 1.32, with
CHUNKING 1.0 to 1.1. So uvloop where there is TLS and it is installed, and the loop with fewer parts otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal

from engine.errors import EngineError, Exit

Choice = Literal["auto", "asyncio", "uvloop"]


class NoUvloop(EngineError):
    """[delivery] event_loop asks for uvloop, which is not installed."""

    exit_code = Exit.SETTINGS
    hint = 'Install the extra `fast`, or say event_loop = "auto".'


def loop_factory(choice: Choice, *, tls: bool) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """For `asyncio.Runner(loop_factory=...)`; None is asyncio's own. Raises NoUvloop where it is asked for and absent.

    `tls`: whether most of the sending will be encrypted.
    """
    has_uvloop = find_spec("uvloop") is not None
    if choice == "uvloop" and not has_uvloop:
        raise NoUvloop
    if choice == "asyncio" or not has_uvloop or (choice == "auto" and not tls):
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
