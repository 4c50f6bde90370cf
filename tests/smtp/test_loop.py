"""The event loop by choice and by what is sent."""

from __future__ import annotations

import pytest

from engine.smtp import loop
from engine.smtp.loop import NoUvloop, loop_factory


def test_uvloop_is_for_tls_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    uvloop = pytest.importorskip("uvloop")
    assert loop_factory("auto", tls=True) is uvloop.new_event_loop
    assert loop_factory("auto", tls=False) is None
    assert loop_factory("uvloop", tls=False) is uvloop.new_event_loop
    assert loop_factory("asyncio", tls=True) is None
    monkeypatch.setattr(loop, "find_spec", lambda name: None)
    assert loop_factory("auto", tls=True) is None
    with pytest.raises(NoUvloop):
        loop_factory("uvloop", tls=True)
