"""The command `engine`: finds the command's module, runs it, and turns an error into a message and an exit code."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from engine import __version__
from engine.errors import EngineError, Exit

# command -> (module, function); modules load only when their command is asked for, so that `engine --help` is quick
# and a missing extra is felt only by the command that needs it.
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("engine.commands.campaign", "init"),
    "demo": ("engine.commands.demo", "demo"),
    "check": ("engine.commands.check", "check"),
    "preview": ("engine.commands.preview", "preview"),
    "dkim-key": ("engine.commands.preview", "dkim_key"),
    "plan": ("engine.commands.plan", "plan"),
    "send": ("engine.commands.send", "send"),
    "status": ("engine.commands.status", "status"),
    "machines": ("engine.commands.cluster", "machines"),
    "batches": ("engine.commands.cluster", "batches"),
    "pause": ("engine.commands.cluster", "pause"),
    "resume": ("engine.commands.cluster", "resume"),
    "slow": ("engine.commands.slow", "slow"),
    "cancel": ("engine.commands.cluster", "cancel"),
    "release": ("engine.commands.cluster", "release"),
    "placement": ("engine.commands.cluster", "placement"),
    "doubt": ("engine.commands.doubt", "doubt"),
    "restore-store": ("engine.commands.restore", "restore_store"),
    "prepare": ("engine.commands.prepare", "prepare"),
    "inspect": ("engine.commands.prepare", "inspect_command"),
    "suppress": ("engine.commands.suppress", "suppress"),
    "forget": ("engine.commands.suppress", "forget"),
    "merge-logs": ("engine.commands.results", "merge_logs"),
    "report": ("engine.commands.results", "report"),
    "retry-list": ("engine.commands.results", "retry_list"),
    "write-back": ("engine.commands.results", "write_back_command"),
    "sink": ("engine.commands.sink", "sink"),
    "simulate": ("engine.commands.simulate", "simulate"),
    "rehearse": ("engine.commands.rehearse", "rehearse"),
    "capacity": ("engine.commands.capacity", "capacity_command"),
    "bounces": ("engine.commands.bounces", "bounces"),
    "resolve": ("engine.commands.resolve", "resolve"),
    "budgets": ("engine.commands.budgets", "budgets"),
    "replies": ("engine.commands.replies", "replies"),
    "serve": ("engine.commands.serve", "serve"),
    "enqueue": ("engine.commands.outbox", "enqueue"),
    "serve-outbox": ("engine.commands.outbox", "serve_outbox"),
    "outbox": ("engine.commands.outbox", "outbox"),
    "issue": ("engine.commands.issue", "issue"),
    "unsubscribe-server": ("engine.commands.unsubscribe", "unsubscribe_server"),
}


class LazyGroup(click.Group):
    """A group whose commands live in `engine/commands/` and are imported when named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name]
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="engine")
def engine() -> None:
    """Send one personalised message to each row of a recipient list, exactly once or with a recorded reason why not."""


def main() -> None:
    """Run the command line; the process ends with a code of the table in README."""
    if sys.platform == "win32":
        click.echo(
            "error: Windows is not supported: the send log needs flock and fdatasync. Use Linux or macOS.", err=True
        )
        sys.exit(Exit.USAGE)
    try:
        # A command's `ctx.exit(code)` comes back as the value.
        code = engine.main(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else Exit.DONE)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as refused:
        refused.show()
        sys.exit(Exit.USAGE)
    except click.Abort:
        click.echo("aborted", err=True)
        sys.exit(130)
    except EngineError as error:
        click.echo(f"error: {error}", err=True)
        if error.next_step:
            click.echo(f"  next: {error.next_step}", err=True)
        sys.exit(error.exit_code)
