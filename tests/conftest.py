"""What every test may rely on: missing servers are skipped, or failures where ROWPOST_REQUIRE_PEERS=1 is set."""

from __future__ import annotations

import os

import pytest

MUST_RUN = os.environ.get("ROWPOST_REQUIRE_PEERS") == "1"
# The markers whose tests need something that is not installed with `pip install -e '.[test]'`.
PEER_MARKERS = frozenset({"postfix", "postgres", "dovecot", "browser", "prometheus"})


def pytest_configure(config: pytest.Config) -> None:
    """Slow and long tests are left out unless `-m` says otherwise."""
    if not config.option.markexpr:
        config.option.markexpr = "not slow and not long"


def require(name: str, missing: str | None) -> None:
    """Skip the test when its server is missing; where servers must be there (CI), fail it."""
    if missing is None:
        return
    if MUST_RUN:
        pytest.fail(f"{name}: {missing} (ROWPOST_REQUIRE_PEERS=1)")
    pytest.skip(f"{name}: {missing}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    """A skip of a test with a server's marker is a failure where servers must be there, however it was skipped."""
    outcome = yield
    report = outcome.get_result()
    if MUST_RUN and report.skipped and PEER_MARKERS & {mark.name for mark in item.iter_markers()}:
        report.outcome = "failed"
        report.longrepr = f"skipped although ROWPOST_REQUIRE_PEERS=1: {report.longrepr[2]}"
