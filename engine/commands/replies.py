"""`engine replies`: what a reply means, whether the rules hold, and what other rules would have changed."""

from __future__ import annotations

import re
from pathlib import Path

import click
import msgspec
from rich.table import Table
from rich.text import Text

from engine.campaign import Campaign
from engine.commands.common import campaign_option
from engine.commands.resolve import wide_console
from engine.errors import EngineError, Exit
from engine.pace.replay import Difference, replay
from engine.pace.rulelint import lint
from engine.pace.rules import STAGES, Judgement, RuleError, load_rules, own_rules
from formats.reply import Reply

_rules_option = click.option(
    "--rules",
    "rule_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A file of rules laid over those in force.",
)


class NoLogs(EngineError):
    """There is no send log in {folder}."""

    exit_code = Exit.USAGE
    hint = "Name the campaign with --campaign DIR, or the log files themselves."


@click.group()
def replies() -> None:
    """Judge replies, check rules, replay logs through changed rules.

    \b
    engine replies judge "550 5.1.1 User unknown"
    engine replies check
    engine replies replay --rules new-rules.toml
    """


@replies.command()
@click.argument("reply", nargs=-1, required=True)
@campaign_option
@click.option("--stage", type=click.Choice(STAGES), default="rcpt", show_default=True, help="The command it answers.")
@click.option("--provider", help="Whose reply it is; without, its words may tell.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def judge(reply: tuple[str, ...], campaign: Campaign, stage: str, provider: str | None, as_json: bool) -> None:
    """What one reply means.

    \b
    engine replies judge --stage dot "552 1 mailbox not found" --provider yahoo
    """
    text = " ".join(reply)
    found = re.match(r"(\d{3})[ -]?(.*)\Z", text, re.S)
    if found is None:
        raise click.BadParameter(f"{text!r} does not begin with a code of three digits", param_hint="REPLY")
    said = load_rules(*own_rules(campaign.folder)).judge(stage, Reply(int(found[1]), found[2]), provider)
    if as_json:
        click.echo(msgspec.json.encode(_plain(said)).decode())
        return
    for key, value in _plain(said).items():
        click.echo(f"{key:9} {value}")


def _plain(said: Judgement) -> dict[str, object]:
    action = {key: value for key, value in msgspec.structs.asdict(said.action).items() if value}
    action.pop("after", None) if said.action.after == 1 else None
    return {
        "verdict": said.verdict.name.lower(),
        "reason": said.reason.name.lower(),
        "scope": said.scope.value,
        "class": said.class_.value,
        "rule": said.rule,
        "suppress": said.suppress,
        "wait_s": said.wait_s,
        "action": action,
    }


@replies.command()
@campaign_option
@_rules_option
def check(campaign: Campaign, rule_file: Path | None) -> None:
    """Run every rule's samples: none dead, shadowed or too greedy.

    \b
    engine replies check --rules new-rules.toml
    """
    files = [*own_rules(campaign.folder), *([rule_file] if rule_file else [])]
    findings = lint(*files)
    for finding in findings:
        click.echo(f"error: {finding}", err=True)
    if findings:
        raise RuleError(file=files[-1].name if files else "replies.toml", rule=findings[0].rule, problem="see above")
    click.echo(f"{len(load_rules(*files).rules)} rules, every sample is judged by its own rule.", err=True)


@replies.command(name="replay")
@click.argument("logs", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@campaign_option
@_rules_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object per difference.")
def replay_command(logs: tuple[Path, ...], campaign: Campaign, rule_file: Path | None, as_json: bool) -> None:
    """Judge a finished campaign's replies by other rules, and show what would have differed.

    The log does not say at which command a reply came: rules bound to a stage hold wherever the rest fits. Without
    --rules the campaign's own and the shipped rules are compared with what was decided then.

    \b
    engine replies replay --rules new-rules.toml
    """
    files = list(logs) or campaign.log_files()
    if not files:
        raise NoLogs(folder=campaign.folder)
    own = own_rules(campaign.folder)
    before = load_rules(*own) if rule_file else None
    found = replay(files, before, load_rules(*own, *([rule_file] if rule_file else [])))
    if as_json:
        for difference in found.differences:
            click.echo(msgspec.json.encode(difference).decode())
        return
    click.echo(
        f"{found.replies:,} replies in {len(files)} logs; {found.changed:,} would have been judged differently",
        err=True,
    )
    for problem in found.problems:
        click.echo(f"warning: {problem}", err=True)
    if found.differences:
        _show(found.differences)


def _show(differences: list[Difference]) -> None:
    table = Table("replies", "provider", "then", "now", "rule", "for example", box=None)
    for one in differences:
        cells = (f"{one.replies:,}", one.provider, one.then, one.now, one.rule, one.example)
        table.add_row(*map(Text, cells))
    wide_console().print(table)
