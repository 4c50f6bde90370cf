"""`engine sink` in the foreground: says where it listens, takes mail, ends on a signal with its counts."""

from __future__ import annotations

import signal
import smtplib
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.commands.sink import sink
from engine.rehearse.record import read_record
from engine.rehearse.running import run_sink_in_process
from engine.rehearse.sink import SinkSettings

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_from_the_first_line_to_the_last(tmp_path: Path, ending: signal.Signals) -> None:
    record, folder = tmp_path / "sink.tsv", tmp_path / "mail"
    command = [sys.executable, "-m", "engine", "sink", "--port", "0", "--record", str(record), "--folder", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        host, _, port = running.stdout.readline().strip().rpartition(":")
        with smtplib.SMTP(host, int(port), timeout=5) as client:
            client.sendmail("a@example.com", ["b@example.org"], b"Subject: x\r\n\r\nHello\r\n")
        running.send_signal(ending)
        _, talk = running.communicate(timeout=10)
    assert running.returncode == 0
    assert "1 messages for 1 recipients in 1 connections" in talk
    assert read_record(record)["recipient"].to_pylist() == ["b@example.org"]
    assert [path.read_bytes() for path in folder.iterdir()] == [b"Subject: x\r\n\r\nHello\r\n"]


@pytest.mark.parametrize("wrong", [["--user", "nobody"], ["--certificate", __file__]])
def test_options_that_do_not_go_together_are_refused(wrong: list[str]) -> None:
    assert CliRunner().invoke(sink, wrong).exit_code == 2


def test_it_ends_with_its_parent() -> None:
    script = (
        "import os, signal, sys\n"
        "from engine.rehearse.running import run_sink_in_process\n"
        "with run_sink_in_process() as running:\n"
        "    print(running.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    pid = int(ended.stdout)
    # It was our grandchild: wait until it is gone or a zombie that init has yet to collect.
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        signal.sigtimedwait([], 0.05)
    raise AssertionError(f"the sink {pid} outlived its parent")


def test_a_sink_survives_senders_that_vanish() -> None:
    with run_sink_in_process(SinkSettings()) as running:
        for _ in range(3):
            client = smtplib.SMTP(running.host, running.port, timeout=5)
            client.ehlo()
            client.mail("a@example.com")
            client.rcpt("slow-100ms-rcpt@example.org")
            client.sock.close()  # type: ignore[union-attr]
            client.file.close()  # type: ignore[union-attr]
        with smtplib.SMTP(running.host, running.port, timeout=5) as last:
            last.sendmail("a@example.com", ["b@example.org"], b"Subject: x\r\n\r\nHello\r\n")
        counts = running.counts()
        assert (counts.connections, counts.messages) == (4, 1)


def test_it_plays_a_world_each_provider_on_its_port(tmp_path: Path) -> None:
    world = tmp_path / "small.toml"
    world.write_text(
        'title = "small"\n[[provider]]\nname = "a"\nconnect_s = 0\n[[provider]]\nname = "b"\nconnections = 0\n'
    )
    command = [sys.executable, "-m", "engine", "sink", "--play", str(world), "--speed", "100"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        places = dict(running.stdout.readline().split() for _ in range(2))
        host, _, port = places["a"].rpartition(":")
        with smtplib.SMTP(host, int(port), timeout=5) as client:
            client.sendmail("a@example.com", ["x@example.org"], b"Subject: x\r\n\r\nHello\r\n")
        host, _, port = places["b"].rpartition(":")
        with pytest.raises(smtplib.SMTPConnectError, match="421"):
            smtplib.SMTP(host, int(port), timeout=5)
        running.send_signal(signal.SIGINT)
        _, talk = running.communicate(timeout=10)
    assert "a: 1 accepted, at most 1 connections of one source" in talk
    assert "b: 0 accepted, at most 0 connections of one source, 1 too many connections" in talk
