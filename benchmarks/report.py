"""How large the report page of a campaign of a hundred million is, and how long a browser takes to show it.

    python -m benchmarks.report --out DIR

The numbers are made up, the shape is not: 40 providers, a day of minutes, 5,000 kinds of reply with long texts, 60,000
events, 40 logs and the domains of such a list. Leaves the page and pictures of it in DIR: two widths, dark, and print.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np

from engine.results.domains import Coded
from engine.results.feedback import Feedback
from engine.results.merged import Event, LogSummary, Merged, PartitionSummary, Reply
from engine.results.page import render_page
from engine.results.recipients import Written
from engine.results.resolve import ACCEPTED, Duplicate
from engine.results.summary import Summary, summarise
from engine.results.tally import Tally
from formats.outcomes import WORDS
from formats.plan import Batch, ListFile, Partition, Plan
from formats.sendlog import Verdict

CHROMIUM = "/usr/bin/chromium"
T0 = 1_780_000_000_000_000
ROWS = 100_000_000
PROVIDERS = ["google", "microsoft", "yahoo", *(f"provider-with-a-long-name-{n:02}" for n in range(37))]
MINUTES = 24 * 60


def a_large_campaign(rng: np.random.Generator) -> Summary:
    """Its summary, by way of what a merge would have held of it."""
    chance = random.Random(1)
    share = 1 / np.arange(1, len(PROVIDERS) + 1)
    verdicts = [Verdict.ACCEPTED, Verdict.REJECTED, Verdict.DEFERRED, Verdict.LOST]
    provider, minute, verdict = np.meshgrid(np.arange(len(PROVIDERS)) + 1, np.arange(MINUTES), verdicts, indexing="ij")
    day = 1 + 0.5 * np.sin(minute / MINUTES * 6.28 + provider)
    wanted = ROWS / MINUTES * share[provider - 1] / share.sum() * day
    weight = np.select([verdict == Verdict.ACCEPTED, verdict == Verdict.DEFERRED], [0.98, 0.06], 0.01)
    count = rng.poisson(wanted * weight)
    code = np.select([verdict == v for v in verdicts[:3]], [250, 550, 451], 0)
    flat = [a.ravel().astype(np.int64) for a in (provider, verdict, code, minute + T0 // 60_000_000, count)]
    tally = Tally(*(a[flat[-1] > 0] for a in flat))
    word = np.zeros(len(WORDS), np.int64)
    word[[WORDS.index(w) for w in WORDS]] = rng.integers(1_000, 90_000, len(WORDS))
    word[ACCEPTED] += ROWS - word.sum()
    by_provider = np.outer(np.concatenate(([0.01], share)) / (share.sum() + 0.01), word).astype(np.int64)
    by_provider[1] += word - by_provider.sum(axis=0)
    long = "The account you tried to reach is over quota <script>alert(1)</script> " * 7
    plan = Plan(
        campaign_id="spring-2026-newsletter-for-everybody",
        planned_at_us=T0,
        rows=ROWS,
        files=[ListFile("list.parquet", ROWS, [ROWS], "-")],
        batches=[Batch(0, ROWS)],
        partitions=[Partition(0, 1)],
        address_column="email",
        columns=["email"],
        list_fingerprint="-",
        settings_fingerprint="-",
        templates_fingerprint="-",
        key_id="-",
    )
    events = [
        Event(
            T0 + n * 1_400_000,
            chance.choice(PROVIDERS),
            "10.0.0.1",
            f"machine-{n % 5}",
            f"{chance.choice(['eased', 'grown', 'suspended'])}: connections={n % 97} after 4.7.{n % 30} {long[:200]}",
        )
        for n in range(60_000)
    ]
    merged = Merged(
        plan=plan,
        word=np.zeros(0, np.uint8),
        counts=word,
        provider_counts=by_provider,
        providers=[None, *PROVIDERS],
        sources=[None, "10.0.0.1"],
        machines=[f"machine-{n // 8}" for n in range(40)],
        logs=[
            LogSummary(
                log_id=f"{n:032x}-{n:03}",
                path=f"/srv/campaigns/spring-2026/machine-{n // 8}/logs/{n:032x}.arrows",
                machine=f"machine-{n // 8}",
                worker=n % 8,
                records=5_300_000,
                in_doubt=n % 7,
                is_closed=n % 9 > 0,
                torn=0,
                bytes=70_000_000,
                first_us=T0,
                last_us=T0 + MINUTES * 60_000_000,
            )
            for n in range(40)
        ],
        damage=[],
        notes=[f"/srv/logs/{n}.arrows was not closed: its worker was killed, or still runs" for n in range(5)],
        duplicates=[Duplicate(n, 2, n % 2 == 0, [T0, T0 + 9_000_000], [n % 40, 3]) for n in range(120)],
        partitions=[PartitionSummary(n, n * 20_000_000, 20_000_000, 100 * n) for n in range(5)],
        tally=tally,
        replies=[
            Reply(chance.choice(PROVIDERS), 3, 451, f"4.7.{n} {long}", 9_000_000 // (n + 1), f"4.7.{n} {long}")
            for n in range(5_000)
        ],
        events=events,
        feedback=Feedback(),
        _spool=cast("object", SimpleNamespace()),
        _provider_maps=[],
        _source_maps=[],
        _same_log=np.zeros(0, np.int32),
        _resent=frozenset(),
        _scratch=None,
    )
    written = Written(recipients=ROWS, undeliverable=1_200_000, suppress=900_000)
    names = [*(f"{name}.example" for name in PROVIDERS), *(f"d{n}.example.test" for n in range(50_000))]
    codes = rng.zipf(1.3, 1_000_000) % len(names)
    words = np.where(rng.random(len(codes)) < 0.98, ACCEPTED, rng.integers(0, len(WORDS), len(codes)))
    first = np.full(len(codes), T0)
    written.domains.add(
        Coded(names, codes), words, np.ones(len(codes)), first, first + rng.integers(1, 9e9, len(codes))
    )
    planned = {name: 4e6 / n for n, name in enumerate(PROVIDERS, 1)}
    return summarise(merged, written, merged_at_us=T0 + 90_000_000_000, planned_per_hour=planned)


def look(page: Path, out: Path) -> float:
    """Seconds until a browser has laid the page out; and pictures of it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            best = 99.0
            for _ in range(3):
                tab = browser.new_page(viewport={"width": 1280, "height": 900})
                began = time.perf_counter()
                tab.goto(page.resolve().as_uri())
                tab.evaluate("document.body.getBoundingClientRect().height")
                best = min(best, time.perf_counter() - began)
                tab.close()
            for name, width, scheme in (("wide", 1280, "light"), ("phone", 390, "light"), ("dark", 1280, "dark")):
                tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
                tab.goto(page.resolve().as_uri())
                tab.screenshot(path=str(out / f"{name}.png"), full_page=True)
                across = tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")
                print(f"{name}: {'fits' if across <= 0 else f'{across} px too wide'}")
                if name == "wide":
                    tab.pdf(path=str(out / "print.pdf"), format="A4")
                tab.close()
        finally:
            browser.close()
    return best


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("bench-report"))
    out = options.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    began = time.process_time()
    summary = a_large_campaign(np.random.default_rng(1))
    summed = time.process_time()
    page = out / "index.html"
    page.write_text(render_page(summary, " --campaign spring"), "utf-8")
    drawn = time.process_time()
    print(
        f"page {page.stat().st_size / 1e6:.2f} MB; summed up in {summed - began:.1f} s, drawn in {drawn - summed:.1f} s"
    )
    print(f"shown in {look(page, out):.2f} s")


if __name__ == "__main__":
    main()
