"""Refusals that are about us: in numbers they pause whoever refuses, and suppress nobody."""

from __future__ import annotations

import pytest

from engine.lists.suppressions import Suppressions
from tests.campaign.conftest import Operator

RULE = """
[[rule]]
name = "ours"
class = "unknown_user"
text = "refused by policy"
samples = ["rcpt 554 5.7.1 Message refused by policy"]
"""


@pytest.mark.slow
def test_policy_refusals_above_a_share_pause_the_relay_with_the_reason(operator: Operator) -> None:
    rows = [f"554+{n}@sink.test" if n % 3 == 0 else f"r{n}@sink.test" for n in range(600)]
    operator.begin(rows, connections=2, messages_per_second=100)
    said = operator.run("send", "--processes", "2", "--yes", "--max-wait", "0", code=3).stderr
    assert "reply_alarm" in said
    assert "rule=policy" in said
    assert "throttle_suspended" in said
    assert "such replies within" in said
    found = operator.outcomes(code=None)
    assert 20 <= found["bounced"] < 100
    assert found["unsent"] > 300
    assert {row["reason"] for row in operator.rows() if row["outcome"] == "bounced"} == {"policy"}
    assert not Suppressions(operator.campaign / "suppression", list_id="news").check(rows).any()


@pytest.mark.slow
def test_a_few_policy_refusals_pause_nobody(operator: Operator) -> None:
    operator.begin([f"554+{n}@sink.test" if n % 10 == 0 else f"r{n}@sink.test" for n in range(600)])
    operator.run("send", "--processes", "2", "--yes")
    assert operator.outcomes() == {"accepted": 540, "bounced": 60}


@pytest.mark.slow
def test_the_campaign_s_own_rules_judge_what_is_sent(operator: Operator) -> None:
    operator.begin(["554+a@sink.test", "r1@sink.test"])
    (operator.campaign / "replies.toml").write_text(RULE, "utf-8")
    operator.run("send", "--processes", "1", "--yes")
    operator.outcomes()
    assert {row["reason"] for row in operator.rows() if row["outcome"] == "bounced"} == {"recipient"}
