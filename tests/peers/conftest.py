"""Servers of other people, private and on loopback: Postfix of Debian, aiosmtpd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import require
from tests.peers.aiosmtpd_server import AiosmtpdServer, running_aiosmtpd
from tests.peers.postfix import Postfix, missing_postfix, running_postfix


@pytest.fixture(scope="session")
def postfix() -> Iterator[Postfix]:
    """A private Postfix for the whole run; messages of several tests share its maildir."""
    require("postfix", missing_postfix())
    with running_postfix() as running:
        yield running


@pytest.fixture
def aiosmtpd_server() -> Iterator[AiosmtpdServer]:
    """aiosmtpd in a thread."""
    with running_aiosmtpd() as server:
        yield server
