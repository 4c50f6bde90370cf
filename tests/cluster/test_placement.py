"""The files that `engine placement` prints, by the tools that will read them where these are installed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from engine.commands.cluster import PLACEMENTS, placement
from engine.errors import Exit
from tests.campaign.conftest import ROOT
from tests.conftest import require
from tests.control.postgres_server import PostgresServer

FOLDER = Path(str(files("engine").joinpath("placement")))
SCRIPTS = ("ssh.sh", "slurm.sh", "local.sh")


def tool(name: str) -> str:
    found = shutil.which(name)
    require(name, None if found else f"{name} is not installed here")
    assert found is not None
    return found


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **environ})


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "rowpost@.service"
    unit.write_text((FOLDER / "rowpost@.service").read_text("utf-8"), "utf-8")
    done = run(tool("systemd-analyze"), "verify", str(tmp_path / "rowpost@3.service"))
    # It ends well with an unknown key as well, and says so.
    assert (done.returncode, done.stderr) == (0, "")
    spoilt = unit.read_text("utf-8").replace("KillMode", "KilMode")
    unit.write_text(spoilt, "utf-8")
    assert "KilMode" in run(tool("systemd-analyze"), "verify", str(tmp_path / "rowpost@3.service")).stderr


def test_the_unit_does_not_start_again_what_will_not_change() -> None:
    text = (FOLDER / "rowpost@.service").read_text("utf-8")
    settings = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and line[0].isupper())
    never = {int(code) for code in settings["RestartPreventExitStatus"].split()}
    good = {int(code) for code in settings["SuccessExitStatus"].split()}
    assert not never & good
    assert never | good | {Exit.DONE, Exit.BUG, Exit.TRY_AGAIN} == set(Exit), "each exit code has its answer"


# The fields of batch/v1 that the file uses, by the API reference of Kubernetes 1.33.
JOB: dict[str, type] = {
    "completionMode": str, "completions": int, "parallelism": int, "backoffLimitPerIndex": int,
    "podFailurePolicy": dict, "template": dict,
}  # fmt: skip


def test_the_kubernetes_job_has_the_fields_that_its_kind_has() -> None:
    yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed here")
    (job,) = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text("utf-8")))
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec = job["spec"]
    assert {name: type(value) for name, value in spec.items()} == JOB
    assert spec["completionMode"] == "Indexed"  # backoffLimitPerIndex and FailIndex need it
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # so does podFailurePolicy
    assert pod["terminationGracePeriodSeconds"] >= 600, "a final dot may wait for ten minutes"
    (container,) = pod["containers"]
    for rule in spec["podFailurePolicy"]["rules"]:
        assert rule["action"] in ("FailIndex", "FailJob", "Ignore", "Count")
        assert rule["onExitCodes"]["containerName"] == container["name"]
        assert rule["onExitCodes"]["operator"] in ("In", "NotIn")
        assert int(Exit.TRY_AGAIN) not in rule["onExitCodes"]["values"]
        assert set(rule["onExitCodes"]["values"]) <= set(map(int, Exit))
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert all({"name"} < set(one) <= {"name", "value", "valueFrom"} for one in container["env"])
    assert "$JOB_COMPLETION_INDEX" in container["args"][0]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_shell_reads_the_scripts(name: str) -> None:
    done = run("sh", "-n", str(FOLDER / name))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_finds_nothing(name: str) -> None:
    # SC2086: HOSTS is a list of words on purpose.
    done = run(tool("shellcheck"), "--shell=sh", "--exclude=SC2086", str(FOLDER / name))
    assert done.returncode == 0, done.stdout


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def fake(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n", "utf-8")
    (folder / name).chmod(0o755)


def test_the_ssh_loop_starts_a_sender_a_host_and_starts_it_again(tmp_path: Path) -> None:
    bin_ = tmp_path / "bin"
    fake(bin_, "ssh", 'shift; cd "$PWD" && exec sh -c "$1"')
    fake(bin_, "sleep", ":")
    # The first time it asks to be started again, then it is done.
    fake(bin_, "engine", 'echo "$@" >>asked; grep -c "partition $3 " asked | grep -q 2 && exit 0; exit 75')
    path = f"{bin_}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", str(FOLDER / "ssh.sh")], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=30,
        env={**os.environ, "PATH": path, "HOSTS": "mail1 mail2", "ROWPOST_CONTROL": "postgresql://x/y"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    asked = sorted((tmp_path / "asked").read_text("utf-8").splitlines())
    assert [line.partition(" --yes")[0] for line in asked] == [
        "send --partition 0", "send --partition 0", "send --partition 1", "send --partition 1"
    ]  # fmt: skip
    assert all(f"--name mail{1 + int(line.split()[2])}" in line for line in asked)


def test_the_slurm_task_takes_the_partition_of_its_number(tmp_path: Path) -> None:
    bin_ = tmp_path / "bin"
    fake(bin_, "engine", 'echo "$@"')
    path = f"{bin_}{os.pathsep}{os.environ['PATH']}"
    done = run("sh", str(FOLDER / "slurm.sh"), PATH=path, SLURM_ARRAY_TASK_ID="3", ROWPOST_CONTROL="postgresql://x/y")
    assert done.stdout.startswith("send --partition 3 --campaign "), done.stderr
    assert run("sh", str(FOLDER / "slurm.sh"), PATH=path, ROWPOST_CONTROL="").returncode != 0


def test_every_placement_is_printed() -> None:
    for name in PLACEMENTS:
        done = CliRunner().invoke(placement, [name])
        assert done.exit_code == 0, done.output
        assert done.output.strip()


@pytest.mark.long
@pytest.mark.postgres
def test_the_tour_of_five_machines_from_an_empty_folder(tmp_path: Path, cluster_server: PostgresServer) -> None:
    fake(tmp_path / "bin", "engine", f'exec {sys.executable} -m engine "$@"')
    environ = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHON": sys.executable,
        "ROWPOST_CONTROL": cluster_server.url,
        "PORT": str(free_port()),
    }
    process = subprocess.Popen(
        ["sh", str(FOLDER / "local.sh")], cwd=tmp_path, env=environ, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        pytest.fail(f"it does not come to its end:\n{out}")
    assert process.returncode == 0, out
    assert "machine-2" in out
    assert "in doubt" in out
    assert (tmp_path / "five" / "campaign" / "report" / "summary.json").exists(), out
