"""`engine check` tries everything but sending, and says what is wrong with the next step."""

from __future__ import annotations

import socket

from tests.campaign.conftest import Operator


def test_a_good_campaign_checks_out(operator: Operator) -> None:
    operator.begin(["ann@example.com"])
    checked = operator.run("check")
    assert "FAIL" not in checked.stdout
    assert "greets: 220" in checked.stdout
    assert "PIPELINING" in checked.stdout
    assert "warn  message: dkim: not signed here" in checked.stdout
    assert "ok    message: unsubscribe: one click" in checked.stdout
    assert operator.received().messages == 0


def test_a_relay_that_is_away_fails_the_check(operator: Operator) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        operator.begin(["ann@example.com"], relay=f"smtp://127.0.0.1:{taken.getsockname()[1]}")
        checked = operator.run("check", code=75)
    assert "FAIL  relay" in checked.stdout
    assert "next:" in checked.stdout


def test_a_template_that_names_a_missing_column_fails_with_the_nearest_name(operator: Operator) -> None:
    operator.begin(["ann@example.com"])
    (operator.campaign / "templates" / "letter.txt").write_text("Hello {{ frist_name }}", "utf-8")
    (operator.campaign / "plan.json").unlink()
    checked = operator.run("check", code=23)
    assert "first_name" in checked.stdout


def test_a_lost_key_file_is_refused_plainly(operator: Operator) -> None:
    operator.begin(["ann@example.com"])
    (operator.campaign / "keys" / "secret.keys").unlink()
    checked = operator.run("check", code=24)
    assert "secret.keys" in checked.stdout


def test_an_unknown_setting_names_key_and_file(operator: Operator) -> None:
    operator.begin(["ann@example.com"])
    operator.set("conections", 5)
    refused = operator.run("check", code=20)
    assert "conections" in refused.stderr
    assert "campaign.toml" in refused.stderr
