"""The product against played providers whose limits drop and return: its own events become the picture of the guide.

    python benchmarks/course.py [--rows 9500] [--world benchmarks/course.toml] [--lines FILE] [--picture FILE.svg]

A direct campaign in real time (about a quarter of an hour) on loopback. `engine send --log-format json` tells every
few seconds what each provider took, how many connections stand, and each change of the throttle; `--lines` keeps these
lines, `--draw LINES` draws the picture of lines kept before. Printed: per provider rows, finish, refusals, and the
least time that the models allow.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine.rehearse.internet import InternetSettings, run_internet, zone_of
from engine.rehearse.models import Model, load_world, rows_of, world_bound_s

ROOT = Path(__file__).parents[1]

SETTINGS = """\
[campaign]
id = "course"
[list]
batch_rows = 500
[message]
from_address = "news@example.com"
subject = "Hello"
text = "templates/short"
[delivery]
mode = "direct"
nameservers = ["{nameserver}"]
smtp_port = {port}
allow_private_hosts = true
"""


def budget_of(model: Model) -> str:
    """A budget that is as generous as the model is at its best."""
    connections = model.budget_connections or model.connections
    text = f'[provider."{model.name}.test"]\nconnections = {connections}\nconnections_per_minute = 600\n'
    if model.rate_per_s is not None:
        text += f"messages_per_minute = {round(model.rate_per_s * 60)}\n"
    return text


def main() -> None:
    """Run, or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=9500)
    parser.add_argument("--world", default=str(Path(__file__).with_name("course.toml")))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--lines", type=Path, default=Path("course.jsonl"))
    parser.add_argument("--draw", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    world = load_world(options.world)
    if options.draw is None:
        run(options, world)
    if options.picture is not None:
        from engine.rehearse.drawing import read_course, svg_of

        lines = (options.draw or options.lines).read_text().splitlines()
        options.picture.write_text(svg_of(read_course(lines), world.title), "utf-8")


def run(options: argparse.Namespace, world: object) -> None:
    """One course."""
    counts = rows_of(world, options.rows)
    addresses = {name: f"127.1.0.{number}" for number, name in enumerate(counts, 1)}
    hosts = {f"mx.{name}.test": address for name, address in addresses.items()}
    zone = zone_of(hosts, {f"{name}.test": f"mx.{name}.test" for name in counts})
    left = dict(counts)
    mixed: list[str] = []
    while any(left.values()):  # each provider's rows spread over the whole list
        for name, count in left.items():
            take = min(count, max(1, round(counts[name] / options.rows * 100)))
            mixed += [f"r{count - n}@{name}.test" for n in range(take)]
            left[name] = count - take
    with tempfile.TemporaryDirectory(prefix="course-") as made:
        folder = Path(made)
        settings = InternetSettings(world=world, zone=zone, addresses=addresses)
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "engine"]
        subprocess.run([*command, "init"], cwd=folder, env=environ, check=True, stderr=subprocess.DEVNULL)
        campaign = folder / "campaign"
        table = pa.table({"email": mixed, "first_name": ["You"] * len(mixed)})
        pq.write_table(table, campaign / "list.parquet", row_group_size=500)
        (campaign / "templates" / "short").write_text("Hello {{ first_name }}\n")
        (campaign / "budgets.toml").write_text("\n".join(budget_of(model) for model in world.provider))
        with run_internet(settings) as net:
            written = SETTINGS.format(nameserver=net.nameserver, port=net.port)
            (campaign / "campaign.toml").write_text(written)
            subprocess.run([*command, "plan", "list.parquet"], cwd=folder, env=environ, check=True)
            with options.lines.open("w") as lines:
                words = ["send", "--yes", "--processes", str(options.processes), "--log-format", "json"]
                subprocess.run([*command, *words], cwd=folder, env=environ, stderr=lines, check=False)
            bound, bounds = world_bound_s(world, options.rows, 1)
            print(f"{options.rows} rows; the models allow {bound:.0f} s")
            for name, report in net.reports().items():
                finished = report.last_accepted_s or 0.0
                answers = {kind: count for kind, count in report.answers.items() if kind != "accepted"}
                print(
                    f"{name:<8} {report.accepted:>6} accepted, finished after {finished:.0f} s "
                    f"(at best {bounds[name]:.0f} s), {answers}"
                )


if __name__ == "__main__":
    main()
