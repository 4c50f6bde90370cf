"""The table that adds up, for a terminal or a pipe: recipient domains and outcomes, and what to do next."""

from __future__ import annotations

from engine.results.summary import Line, Summary
from formats.outcomes import Outcome

# Operators say "sent" for accepted.
HEADS = {
    Outcome.ACCEPTED: "sent",
    Outcome.BOUNCED: "bounced",
    Outcome.DEFERRED: "deferred",
    Outcome.IN_DOUBT: "in doubt",
    Outcome.SUPPRESSED: "suppressed",
    Outcome.INVALID: "invalid",
    Outcome.UNSENT: "unsent",
}


def cells(line: Line) -> list[str]:
    """A line of the table as text: name, rows, a column per outcome."""
    return [shown(line.name), f"{line.rows:,}", *(f"{line.outcomes[outcome]:,}" for outcome in Outcome)]


def shown(text: str) -> str:
    """`text` without what a terminal would obey: an address of the list may hold anything."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def table(summary: Summary) -> list[list[str]]:
    """Head, lines, and the sum of each column."""
    total = Line(name="total", rows=summary.rows, outcomes=summary.outcomes)
    head = ["domain", "rows", *HEADS.values()]
    return [head, *(cells(line) for line in summary.domains), cells(total)]


def plain(lines: list[list[str]]) -> str:
    """Aligned text."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(w) if c == 0 else text.rjust(w) for c, (text, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def rich_table(lines: list[list[str]]) -> object:
    """The same for a terminal."""
    from rich.table import Table
    from rich.text import Text

    made = Table(show_footer=True, header_style="bold", footer_style="bold")
    for column, head in enumerate(lines[0]):
        made.add_column(head, Text(lines[-1][column]), justify="left" if column == 0 else "right")
    for line in lines[1:-1]:
        made.add_row(*(Text(text) for text in line))
    return made


def next_steps(summary: Summary, campaign: str = "") -> list[str]:
    """What is open, and the command that goes on with it. `campaign` is " --campaign DIR" or nothing."""
    steps = []
    reasons, outcomes = summary.reasons, summary.outcomes
    open_rows = reasons.get("unsent/waiting", 0) + reasons.get("unsent/not_reached", 0)
    if not summary.adds_up:
        steps.append(f"the outcomes do not add up to the rows of the plan: {'; '.join(summary.gaps) or 'report this'}")
    if summary.duplicate_rows:
        steps.append(
            f"{summary.duplicate_rows:,} rows were accepted more than once ({summary.duplicates_by_resend:,} by an"
            " ordered resend); summary.json lists them"
        )
    if summary.damage:
        steps.append(f"{len(summary.damage):,} files are damaged or do not belong here; they are named below")
    if summary.store_missing:
        steps.append(
            "this plan used a shared store that was not asked: rows without a log are unknown, and no list of unsent"
            " rows was written; merge again where the store can be reached"
        )
    if outcomes[Outcome.IN_DOUBT]:
        steps.append(
            f"{outcomes[Outcome.IN_DOUBT]:,} rows are in doubt: `engine doubt list{campaign}` names them,"
            " `engine doubt accept|resend` decides"
        )
    for reason, why in (("expired", "the campaign expired"), ("cancelled", "it was cancelled")):
        if gone := reasons.get(f"unsent/{reason}", 0):
            steps.append(f"{gone:,} rows stay unsent: {why}; `engine retry-list` makes the next list of them")
    if open_rows:
        waiting = reasons.get("unsent/waiting", 0)
        how = f"`engine send{campaign}`" if len(summary.partitions) < 2 else f"`engine send --partition N{campaign}`"
        steps.append(f"{open_rows:,} rows are unsent ({waiting:,} of them wait for another attempt): {how} goes on")
    return steps
