"""What a message costs to compose, beside the usual Python way, and what signing adds. One core.

    python benchmarks/compose.py            quick, some seconds
    python benchmarks/compose.py --full     what the README quotes: longer, best of five, memory over a million rows

The message: 20 kB of HTML and 4 kB of text, eight fields; once with fields alone, once with a condition and a loop over
five items of two fields. The usual way is Jinja2, EmailMessage, as_bytes. Both write the same headers and run in turn.
Times are CPU of this process, all threads together; for signing also wall time. "One core": taskset -c 0.
"""

from __future__ import annotations

import argparse
import email.utils
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.message import EmailMessage
from email.policy import SMTP
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import pyarrow as pa
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed

from engine.compose.keys import write_new_keys
from engine.compose.render import Composer, RowProblem, build_composer
from engine.compose.sign import make_key
from engine.config import Settings
from formats.address import Mailbox

COLUMNS = ("first", "last", "city", "code", "points", "link", "offer", "store")
ITEM = pa.list_(pa.struct([("name", pa.string()), ("price", pa.string())]))
SCHEMA = pa.schema([(name, pa.string()) for name in COLUMNS] + [("items", ITEM)])
LIST_URL = "https://news.example.org/u/{token}"
NOW_US = 1_790_000_000_000_000


def page(words: int, mark_up: bool, middle: str) -> str:
    """A body of filler with the eight fields spread through it and `middle` in its middle."""
    fields = [f"{{{{ {name} }}}}" for name in COLUMNS]
    lines = []
    for number in range(words):
        text = f"Line {number} of an honest newsletter, with a word about apples & pears, crème and 100% of nothing."
        if number % max(1, words // 8) == 0 and fields:
            text += f" And for you: {fields.pop(0)}!"
        lines.append(f'  <p style="margin:0 0 8px">{text.replace("&", "&amp;")}</p>' if mark_up else text)
    lines.insert(len(lines) // 2, middle)
    body = "\n".join(lines) + "\n" + " ".join(fields) + "\n"
    return f"<!doctype html>\n<html><body>\n{body}</body></html>\n" if mark_up else body


def rows(count: int) -> list[tuple[Any, ...]]:
    """Rows as Arrow would give them."""
    return [
        (
            f"Ann{n}", "O'Brien & Söhne" if n % 10 == 0 else "Miller", "Lyon", f"C{n:07d}", f"{n % 977}",
            f"https://shop.example.org/o/{n}?a=1", "Ten per cent", "Rue de la Paix 3",
            [{"name": f"Item {k}", "price": f"{k}.50"} for k in range(5)],
        )
        for n in range(count)
    ]  # fmt: skip


def make_folder(html: str, text: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="rowpost-bench-"))
    (folder / "page.html").write_text(html)
    (folder / "text.txt").write_text(text)
    write_new_keys(folder / "keys/secret.keys")
    make_key(folder / "keys/dkim.pem", "rsa")
    return folder


def composer_for(folder: Path, *, signed: bool) -> Composer:
    message = {
        "from_address": "news@example.org", "from_name": "The News", "to_name": "{{ first }} {{ last }}",
        "subject": "News for {{ first }}", "html": "page.html", "text": "text.txt", "unsubscribe_url": LIST_URL,
        "list_id": "news.example.org", "feedback_id": "spring:news:example",
    }  # fmt: skip
    dkim = [{"domain": "example.org", "selector": "s1", "key_file": "keys/dkim.pem"}] if signed else []
    settings = msgspec.convert({"campaign": {"id": "bench"}, "message": message, "dkim": dkim}, Settings)
    return build_composer(settings, folder, SCHEMA)


def usual_way(html: str, text: str) -> Callable[[int, tuple[Any, ...]], bytes]:
    """Jinja2, EmailMessage, as_bytes, with the headers of a bulk sender."""
    page_template = jinja2.Environment(autoescape=True).from_string(html)
    text_template = jinja2.Environment().from_string(text)
    subject = jinja2.Environment().from_string("News for {{ first }}")
    names = (*COLUMNS, "items")

    def make(row: int, values: tuple[Any, ...]) -> bytes:
        fields = dict(zip(names, values, strict=True))
        message = EmailMessage()
        message["Date"] = email.utils.formatdate(NOW_US // 1_000_000)
        message["From"] = "The News <news@example.org>"
        message["To"] = email.utils.formataddr((f"{fields['first']} {fields['last']}", f"r{row}@example.net"))
        message["Subject"] = subject.render(fields)
        message["Message-ID"] = f"<{row:032x}@example.org>"
        message["List-Id"] = "<news.example.org>"
        message["List-Unsubscribe"] = f"<{LIST_URL.replace('{token}', f'{row:044x}')}>"
        message["List-Unsubscribe-Post"] = "List-Unsubscribe=One-Click"
        message["Feedback-ID"] = "spring:news:example"
        message.set_content(text_template.render(fields))
        message.add_alternative(page_template.render(fields), subtype="html")
        return message.as_bytes(policy=SMTP)

    return make


def cost_us(work: Callable[[], object], count: int) -> float:
    """CPU microseconds of this process for each of `count` messages that `work` makes."""
    start = time.process_time()
    work()
    return (time.process_time() - start) / count * 1e6


def compare(name: str, middle: tuple[str, str], rounds: int, count: int) -> dict[str, float]:
    """Both ways in turn; best of `rounds`."""
    html, text = page(150, True, middle[0]), page(38, False, middle[1])
    folder = make_folder(html, text)
    composer, usual, list_rows = composer_for(folder, signed=False), usual_way(html, text), rows(1000)
    wanted = [SCHEMA.names.index(column) for column in composer.columns]
    picked = [tuple(row[index] for index in wanted) for row in list_rows]
    mailboxes = [Mailbox(f"r{n}", "example.net") for n in range(1000)]
    size = len(composer.compose(0, mailboxes[0], picked[0], NOW_US).content)

    def ours() -> None:
        for turn in range(count // 1000):
            for n in range(1000):
                composer.compose(turn * 1000 + n, mailboxes[n], picked[n], NOW_US)

    def theirs() -> None:
        for n in range(usual_count):
            usual(n, list_rows[n])

    usual_count = max(50, count // 200)
    ours(), theirs()
    best_ours = best_theirs = float("inf")
    for _ in range(rounds):
        best_theirs = min(best_theirs, cost_us(theirs, usual_count))
        best_ours = min(best_ours, cost_us(ours, count // 1000 * 1000))
    return {
        "html_bytes": len(html.encode()), "text_bytes": len(text.encode()), "message_bytes": size,
        "ours_us": round(best_ours, 1), "usual_us": round(best_theirs), "times": round(best_theirs / best_ours),
    }  # fmt: skip


def signing(rounds: int, count: int) -> dict[str, float]:
    """Signed messages a second against bare signatures of the same key; one thread each, then two."""
    folder = make_folder(page(150, True, ""), page(38, False, ""))
    composer = composer_for(folder, signed=True)
    key = serialization.load_pem_private_key((folder / "keys/dkim.pem").read_bytes(), None)
    assert isinstance(key, rsa.RSAPrivateKey)
    wanted = [SCHEMA.names.index(column) for column in composer.columns]
    work = [
        (n, Mailbox(f"r{n}", "example.net"), tuple(row[index] for index in wanted)) for n, row in enumerate(rows(count))
    ]
    digest, pad, prehashed = bytes(32), padding.PKCS1v15(), Prehashed(hashes.SHA256())

    def bare(numbers: range) -> None:
        for _ in numbers:
            key.sign(digest, pad, prehashed)

    result: dict[str, float] = {}
    for threads in (1, 2):
        best_bare = best_ours = best_bare_cpu = best_ours_cpu = float("inf")
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(rounds):
                start, start_cpu = time.perf_counter(), time.process_time()
                list(pool.map(bare, [range(16)] * (count // 16)))
                best_bare = min(best_bare, time.perf_counter() - start)
                best_bare_cpu = min(best_bare_cpu, time.process_time() - start_cpu)
                start, start_cpu = time.perf_counter(), time.process_time()
                made = composer.compose_many(work, NOW_US, pool)
                best_ours = min(best_ours, time.perf_counter() - start)
                best_ours_cpu = min(best_ours_cpu, time.process_time() - start_cpu)
                assert not any(isinstance(one, RowProblem) for one in made)
        result |= {
            f"bare_per_s_{threads}_threads": round(count / best_bare),
            f"signed_per_s_{threads}_threads": round(count / best_ours),
            f"share_of_wall_{threads}_threads": round(best_bare / best_ours, 3),
            f"share_of_cpu_{threads}_threads": round(best_bare_cpu / best_ours_cpu, 3),
        }
    return result


def memory(count: int) -> dict[str, float]:
    """Resident memory after a tenth of the rows and after all of them, all values new."""
    composer = composer_for(make_folder(page(150, True, ""), page(38, False, "")), signed=False)
    mailbox = Mailbox("ann", "example.net")

    def values() -> Iterator[tuple[int, list[str]]]:
        for n in range(count):
            yield n, [f"{column} {n} ü{chr(0x4E00 + n % 20000)}" for column in composer.columns]

    early = 0
    for n, row in values():
        composer.compose(n, mailbox, row, NOW_US + n)
        if n == count // 10:
            early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    late = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"rows": count, "rss_mb_at_a_tenth": early // 1024, "rss_mb_at_the_end": late // 1024}


CONDITION = (
    "{% if points %}<p>{{ points }} points</p>{% else %}<p>none</p>{% endif %}"
    "<ul>{% for item in items %}<li>{{ item.name }}: {{ item.price }}</li>{% endfor %}</ul>",
    "{% if points %}{{ points }} points{% endif %}\n"
    "{% for item in items %}- {{ item.name }} {{ item.price }}\n{% endfor %}",
)


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--only", choices=["fields", "condition", "signing", "memory"])
    options = parser.parse_args()
    rounds, count = (5, 20_000) if options.full else (2, 2_000)
    parts: dict[str, Callable[[], dict[str, float]]] = {
        "fields": lambda: compare("fields", ("", ""), rounds, count),
        "condition": lambda: compare("condition", CONDITION, rounds, count),
        "signing": lambda: signing(rounds, 4000 if options.full else 480),
        "memory": lambda: memory(1_000_000 if options.full else 20_000),
    }
    print(json.dumps({name: run() for name, run in parts.items() if options.only in (None, name)}, indent=1))


if __name__ == "__main__":
    main()
