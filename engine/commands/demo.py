"""`engine demo`: the main job, whole, on this machine: init, plan, send, merge-logs against the embedded sink."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from engine.campaign import Campaign
from engine.commands.campaign import start_campaign

_RETRY = 'plan = ["1s", "2s", "3s"]'


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path("demo"))
@click.option("--processes", type=click.IntRange(1, 64), default=4, show_default=True)
@click.pass_context
def demo(context: click.Context, folder: Path, processes: int) -> None:
    """Plan, send and prove a campaign of 1,000 rows against a test server inside the sender, in FOLDER (demo).

    Some rows are steered to be refused, deferred or lost, so that the report has something to tell. Retries come after
    1, 2 and 3 seconds in place of the usual minutes. Nothing leaves the machine.

    \b
    engine demo
    """
    campaign = Campaign(folder / "campaign")
    start_campaign(campaign, list_file="demo.parquet")
    _adapt(campaign)
    click.echo(f"A campaign of 1,000 rows in {campaign.folder}; retries after 1, 2 and 3 seconds, for this is a demo.")
    where = ["--campaign", str(campaign.folder)]
    code = 0
    for words in (
        ["plan", "list.parquet", *where],
        ["send", "--processes", str(processes), *where],
        ["merge-logs", *where],
    ):
        click.echo(f"\n$ engine {' '.join(words)}")
        ended = subprocess.run([sys.executable, "-m", "engine", *words], check=False)
        code = ended.returncode
        # The demo steers one row into doubt: merge-logs says so by its exit code, and that is no failure of the demo.
        if code and not (words[0] == "merge-logs" and code == 4):
            context.exit(code)
    click.echo(f"\nThe report: {campaign.report}/index.html; each row's outcome: {campaign.report}/recipients.parquet")
    click.echo(f"  next: engine doubt list {' '.join(where)}; engine preview --rows 0 {' '.join(where)}")


def _adapt(campaign: Campaign) -> None:
    file = campaign.folder / "campaign.toml"
    lines = file.read_text("utf-8").splitlines()
    lines = [_RETRY if line.startswith("plan = ") else line for line in lines]
    at = lines.index("[list]") + 1
    # Small batches, so that every process gets its share of so small a list.
    lines.insert(at, "batch_rows = 50")
    file.write_text("\n".join(lines) + "\n", "utf-8")
