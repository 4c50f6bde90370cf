"""One PostgreSQL server for the tests of the control store; each test gets a campaign of its own in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.conftest import require
from tests.control.postgres_server import PostgresServer, binaries

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    require("postgres", None if binaries() else "no PostgreSQL server binary here")
    server = PostgresServer()
    yield server
    server.remove()


@pytest.fixture
def control_url(postgres_server: PostgresServer) -> str:
    """A store that nobody used yet."""
    return f"{postgres_server.url}?campaign=test-{next(_numbers)}"
