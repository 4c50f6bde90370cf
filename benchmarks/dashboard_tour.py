"""The pictures of the guide `dashboard.md`: a rehearsal against eight played providers, one of which throttles.

    python benchmarks/dashboard_tour.py OUT [--seconds 75]

Plays the providers on loopback, plans and sends a campaign to them, serves the page, and photographs it on a desk and
on a phone, in light and dark. Needs Chromium and playwright.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from playwright.sync_api import Page, sync_playwright

from engine.rehearse.internet import InternetSettings, run_internet, zone_of
from engine.rehearse.models import Change, Model, World
from formats import listmeta

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
# name, share of the rows, messages a second, connections
PROVIDERS = (
    ("bluepost", 0.28, 22.0, 8),
    ("northmail", 0.22, 18.0, 6),
    ("inboxly", 0.16, 12.0, 6),
    ("letterbox", 0.12, 8.0, 4),
    ("postkasten", 0.09, 8.0, 4),
    ("courrier", 0.06, 6.0, 4),
    ("correo", 0.04, 5.0, 2),
    ("oldserver", 0.03, 1.0, 1),
)
ROWS = 12_000
THROTTLES, AT_S = "northmail", 20.0
LETTER = """\
[campaign]
id = "Spring letter"
list_id = "spring"

[message]
from_address = "news@sender.test"
subject = "Spring is here, {{ first_name }}"
text = "templates/letter.txt"

[delivery]
mode = "direct"
nameservers = ["{nameserver}"]
smtp_port = {port}
allow_private_hosts = true
tls = "opportunistic"
"""


def world() -> World:
    """Eight providers; one takes a quarter of what it took, from 20 seconds on."""
    models = []
    for name, share, rate, connections in PROVIDERS:
        changes = (Change(at_s=AT_S, rate=0.2),) if name == THROTTLES else ()
        models.append(
            Model(
                name=name,
                share=share,
                rate_per_s=rate,
                connections=connections,
                connect_s=0.05,
                message_s=0.15,
                burst_s=2.0,
                unknown_share=0.01,
                greylist_share=0.05 if name == "postkasten" else 0.0,
                greylist_s=20.0,
                changes=changes,
                rate_reply="421 4.7.28 Our system has detected an unusual rate of mail; try again later.",
            )
        )
    return World("eight providers, one throttles", tuple(models))


def build(folder: Path, nameserver: str, port: int) -> Path:
    """The campaign, planned."""
    campaign = folder / "spring"
    run(folder, "init", "--campaign", "spring")
    settings = LETTER.replace("{nameserver}", nameserver).replace("{port}", str(port))
    (campaign / "campaign.toml").write_text(settings, "utf-8")
    (campaign / "templates" / "letter.txt").write_text("Dear {{ first_name }}, spring is here.\n", "utf-8")
    addresses, counts = [], {f"{name}.test": int(ROWS * share) for name, share, _, _ in PROVIDERS}
    left = dict(counts)
    while any(left.values()):
        for domain in [d for d, n in left.items() if n for _ in range(max(1, counts[d] // 360))]:
            if left[domain]:
                left[domain] -= 1
                addresses.append(f"reader{left[domain]}@{domain}")
    table = pa.table({"email": addresses, "first_name": ["Ann"] * len(addresses)})
    meta = msgspec.structs.replace(listmeta.of_counts(counts), provider_rows=counts)
    table = table.replace_schema_metadata({b"rowpost": listmeta.encode(meta)})
    pq.write_table(table, campaign / "list.parquet", row_group_size=500)
    budgets = []
    for name, _, rate, connections in PROVIDERS:
        # Four fifths of what is played: the one that throttles does so because its limit drops.
        limits = f"connections = {connections}\nmessages_per_minute = {round(48 * rate)}\n"
        budgets.append(f'[provider."{name}.test"]\n{limits}')
    (campaign / "budgets.toml").write_text("\n".join(budgets), "utf-8")
    run(folder, "plan", "list.parquet", "--campaign", "spring")
    return campaign


def run(folder: Path, *words: str) -> None:
    """`engine WORDS`."""
    subprocess.run([sys.executable, "-m", "engine", *words], cwd=folder, env=environment(), check=True)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "engine", *words],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=75.0)
    given = parser.parse_args()
    addresses = {name: f"127.3.0.{n}" for n, (name, *_) in enumerate(PROVIDERS, 1)}
    zone = zone_of(
        {f"mx.{name}.test": address for name, address in addresses.items()},
        {f"{name}.test": f"mx.{name}.test" for name in addresses},
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        records = folder / "records"
        with run_internet(InternetSettings(world=world(), zone=zone, addresses=addresses, records=records)) as net:
            campaign = build(folder, net.nameserver, net.port)
            server = start(folder, "serve", "spring", "--listen", "127.0.0.1:0")
            assert server.stdout is not None
            url = server.stdout.readline().strip().rstrip("/")
            token = (campaign / "run" / "web.token").read_text().split()[1]
            sender = start(folder, "send", "--campaign", "spring", "--processes", "2", "--yes")
            try:
                photograph(given.out, url, token, given.seconds)
            finally:
                for process in (sender, server):
                    process.send_signal(signal.SIGTERM)
                    process.wait(20)


def photograph(out: Path, url: str, token: str, seconds: float) -> None:
    """The tour: planned, under way, throttled, slowed by hand, paused."""
    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        desk = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light").new_page()
        phone = browser.new_context(
            viewport={"width": 390, "height": 844}, color_scheme="dark", device_scale_factor=2
        ).new_page()
        for page in (desk, phone):
            page.on("console", lambda message: print("console:", message.type, message.text))
            page.goto(f"{url}/login#token={token}")
            page.wait_for_url(re.compile(r".*/c/.*"))
        began = time.monotonic()
        desk.wait_for_timeout(max(0, int(1000 * (began + seconds - time.monotonic()))))
        shoot(desk, out / "dashboard-throttled.png")
        phone.screenshot(path=out / "dashboard-phone.png")
        desk.get_by_role("button", name="Slow bluepost.test").click()
        desk.get_by_label("Connections at most").fill("2")
        desk.screenshot(path=out / "dashboard-slow.png")
        desk.get_by_role("button", name="Slow it").click()
        desk.wait_for_timeout(500)
        desk.get_by_role("button", name="Pause…").click()
        desk.get_by_role("button", name="Pause", exact=True).click()
        desk.wait_for_timeout(6_000)
        desk.screenshot(path=out / "dashboard-paused.png")
        browser.close()


def shoot(page: Page, file: Path) -> None:
    """The page, whole."""
    page.screenshot(path=file, full_page=True)
    print(file)


if __name__ == "__main__":
    main()
