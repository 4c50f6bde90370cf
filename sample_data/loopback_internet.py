"""The internet on loopback, and a direct campaign to it: a name server, eight providers, two sources. Nothing leaves.

    python sample_data/loopback_internet.py [FOLDER] [--rows 2000] [--processes 2] [--keep-open]

Makes FOLDER (default: `internet`) with a campaign of its own, starts the name server and the providers, then runs
`engine plan`, `engine send` and `engine merge-logs` as an operator would, and prints what each provider has counted.
With `--keep-open` the internet stays until Ctrl-C, for tries of your own in FOLDER.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))

import contextlib

from engine.rehearse.internet import InternetSettings, run_internet, zone_of
from engine.rehearse.models import Model, World, rows_of

PROVIDERS = (
    Model(name="bigmail", share=40.0, connections=5, messages_per_connection=50, connect_s=0.02, message_s=0.01),
    Model(name="globalmail", share=20.0, connections=10, greylist_share=0.1, greylist_s=2.0, message_s=0.01,
          connect_s=0.0,
          greylist_reply="450 4.2.0 Greylisted, come again"),
    Model(name="webmail", share=15.0, connections=5, messages_per_connection=20, connect_s=0.02, message_s=0.01),
    Model(name="officemail", share=10.0, connections=8, unknown_share=0.02, connect_s=0.0, message_s=0.01),
    Model(name="tinymail", share=5.0, connections=1, connect_s=0.0, message_s=0.005),
    Model(name="slowmail", share=4.0, connections=4, connect_s=0.5, message_s=0.1),
    Model(name="ratedmail", share=4.0, connections=4, rate_per_s=20.0, connect_s=0.0, message_s=0.01),
    Model(name="quietmail", share=2.0, connections=2, connect_s=0.0, message_s=0.0),
)  # fmt: skip

CAMPAIGN = """\
[campaign]
id = "straight-to-the-providers"
[list]
batch_rows = 500
[message]
from_address = "news@sender.test"
subject = "Hello {{{{ first_name }}}}"
text = "templates/letter.txt"
[delivery]
mode = "direct"
nameservers = ["{nameserver}"]
smtp_port = {port}
allow_private_hosts = true          # providers at loopback addresses: never outside of a rehearsal
[retry]
plan = ["3s", "10s"]
max_age = "1m"
"""

BUDGETS = """\
[source.first]
bind = "127.0.0.2"
greeting_name = "mail1.sender.test"

[source.second]
bind = "127.0.0.3"
greeting_name = "mail2.sender.test"

[default]
connections_per_minute = 1000

"""


def main() -> None:
    """Start it and run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("internet"))
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep-open", action="store_true")
    options = parser.parse_args()
    addresses = {model.name: f"127.1.0.{number}" for number, model in enumerate(PROVIDERS, 1)}
    hosts = {f"mx.{name}.test": address for name, address in addresses.items()}
    zone = zone_of(hosts, {f"{name}.test": f"mx.{name}.test" for name in addresses})
    zone.records["nomail.test"] = {"MX": ["0 ."]}
    world = World("eight providers", PROVIDERS)
    settings = InternetSettings(world=world, zone=zone, addresses=addresses, records=options.folder / "records")
    with run_internet(settings) as net:
        print(f"name server {net.nameserver}; eight providers at 127.1.0.1 to 127.1.0.8, port {net.port}")
        write(options.folder, world, options.rows, net.nameserver, net.port)
        engine(options.folder, "plan", "list.parquet")
        engine(options.folder, "send", "--yes", "--processes", str(options.processes))
        engine(options.folder, "merge-logs")
        print(f"{'provider':<12}{'accepted':>10}  from each source, with the most connections it had open")
        for name, report in net.reports().items():
            sources = ", ".join(
                f"{source}: {told.accepted} ({told.most_connections})"
                for source, told in sorted(report.sources.items())
            )
            print(f"{name:<12}{report.accepted:>10}  {sources}")
        if options.keep_open:
            print("Ctrl-C ends the internet")
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(1e9)


def write(folder: Path, world: World, rows: int, nameserver: str, port: int) -> None:
    """The campaign and its list."""
    engine(folder, "init")
    campaign = folder / "campaign"
    addresses = [f"r{n}@{name}.test" for name, count in rows_of(world, rows).items() for n in range(count)]
    addresses = [address for start in range(97) for address in addresses[start::97]]  # mixed
    addresses += ["somebody@nosuchdomain.test", "somebody@nomail.test"]
    table = pa.table({"email": addresses, "first_name": [f"Reader {n}" for n in range(len(addresses))]})
    pq.write_table(table, campaign / "list.parquet", row_group_size=250)
    (campaign / "campaign.toml").write_text(CAMPAIGN.format(nameserver=nameserver, port=port), "utf-8")
    sections = [f'[provider."{model.name}.test"]\n{budget_of(model)}' for model in world.provider]
    (campaign / "budgets.toml").write_text(BUDGETS + "\n".join(sections), "utf-8")
    (campaign / "templates" / "letter.txt").write_text(
        "Dear {{ first_name }},\n\nthis went straight to you.\n", "utf-8"
    )


def budget_of(model: Model) -> str:
    """What the provider says that it allows."""
    text = f"connections = {model.connections}\n"
    if model.messages_per_connection is not None:
        text += f"messages_per_connection = {model.messages_per_connection}\n"
    if model.rate_per_s is not None:
        text += f"messages_per_minute = {round(model.rate_per_s * 60)}\n"
    return text


def engine(folder: Path, *words: str) -> None:
    """Run `engine WORDS` in the folder, as an operator would."""
    folder.mkdir(parents=True, exist_ok=True)
    print(f"\n$ engine {' '.join(words)}", flush=True)
    root = str(Path(__file__).parents[1])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(
        [sys.executable, "-m", "engine", *words], cwd=folder, env={**os.environ, "PYTHONPATH": paths}, check=False
    )


if __name__ == "__main__":
    main()
