"""Runs every command of the README as it stands there, and those of two pages that it leads to."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from textwrap import indent

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from examples.orders import CRASHED
from halfway.pipelines.cli.app import app
from halfway.pipelines.local.command_settings import command_settings
from halfway.pipelines.local.processes import free_port
from halfway.pipelines.resolve.job import ResolveJob
from halfway.pipelines.runtime.paths import home
from tests.support.delta_rows import delta_rows
from tests.support.message_tables import append, row
from tests.support.paths import ROOT
from tests.support.waiting import until

README = (ROOT / "README.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE))
PAGE = (ROOT / "docs" / "transactions.md").read_text()
BLOCKS = {name: blocks for name, text in SECTIONS.items() if (blocks := re.findall(r"```sh\n(.*?)```", text, re.DOTALL))}
TITLES = ["Two commands", "Publish from your service", "Run the job", "Operate it"]
[MAKE], [SERVICE], [OBSERVE], [OPERATE] = (BLOCKS[title] for title in TITLES)
[NOTEBOOKS] = re.findall(r"^## Notebooks\n.*?```sh\n(.*?)```", (ROOT / "docs" / "operations.md").read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def new_environ(tmp_path: Path) -> dict[str, str]:
    """A new user's environment. All files go below a temporary folder, also the JARs, which are fetched again."""
    (tmp_path / "home").mkdir()
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HALFWAY_HOME": str(tmp_path / "home"),
        "HALFWAY__STORAGE__WAREHOUSE": str(tmp_path / "warehouse"),
        "HALFWAY__STORAGE__CHECKPOINT": str(tmp_path / "checkpoint"),
    }


@pytest.fixture
def environ(new_environ: dict[str, str]) -> dict[str, str]:
    """The environment of a user who has run `make jars`."""
    Path(new_environ["HALFWAY_HOME"], "jars").symlink_to(home() / "jars")
    return new_environ


def shell(command: str, environ: dict[str, str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command in its own session. A time-out ends all of its processes, and its traps stop the broker."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    ) as bash:
        try:
            out, err = bash.communicate(timeout=800)
        except BaseException:  # the test's own limit too
            with suppress(ProcessLookupError):
                os.killpg(bash.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                bash.communicate(timeout=60)
            with suppress(ProcessLookupError):
                os.killpg(bash.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, bash.returncode, out, err)


def test_this_file_runs_every_block_of_commands() -> None:
    assert list(BLOCKS) == TITLES
    assert [line.split("#")[0].strip() for line in MAKE.splitlines()] == ["make run", "make test"]  # `make test` runs this test


@pytest.mark.timeout(500)
@pytest.mark.slow
def test_make_run_succeeds_and_stops_its_broker(new_environ: dict[str, str]) -> None:
    done = shell("make run", new_environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the broker is stopped" in done.stdout + done.stderr
    query = done.stdout.partition("To query them in Python:\n")[2].splitlines()[:4]
    shown = subprocess.run([sys.executable, "-c", textwrap.dedent("\n".join(query))], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.split()[:4] == ["transaction_id", "topic", "tags", "keys"]
    assert len(shown.stdout.splitlines()) == 11


def run_lines(block: str, environ: dict[str, str]) -> str:
    """Run a block line by line, each in its own shell. Return what all of them printed."""
    printed = ""
    try:
        for line in block.splitlines():
            done = shell(line, environ)
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
            printed += done.stdout
    finally:
        shell("halfway broker stop", environ)
    return printed


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_the_first_service_publishes_its_order(environ: dict[str, str], tmp_path: Path) -> None:
    """Run it in a folder of its own, on another port than the README's. What it says to install is installed."""
    [code] = re.findall(r"```python\n(.*?)```", SECTIONS["Publish from your service"], re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    (tmp_path / "shop.py").write_text(code)
    install, *commands = SERVICE.replace("9092", str(free_port())).splitlines()
    assert install.startswith("pip install -e '.[job,spark,tables,metrics]'")
    done = shell("\n".join(["set -e; trap 'halfway broker stop' EXIT", *commands]), environ, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    [message] = [line for line in done.stdout.splitlines() if "apples" in line]
    assert "orders" in message
    assert "order 7" in message


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_service_that_dies_and_the_notebooks(environ: dict[str, str]) -> None:
    [service] = re.findall(r"^## When the process dies\n.*?```sh\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    # All commands run in one shell, because the job runs beside the others.
    done = shell(f"set -e; trap 'set +e; kill $(jobs -p) 2>/dev/null; halfway broker stop' EXIT\n{service}", environ)
    printed = done.stdout
    assert done.returncode == 0, printed + done.stderr
    assert printed.count("died") == 2
    messages = environ["HALFWAY__STORAGE__WAREHOUSE"] + "/messages"
    rows = delta_rows(messages, "SELECT CAST(body AS STRING) AS body FROM rows ORDER BY half_at")
    assert [row["body"] for row in rows] == ['{"item": "apples", "quantity": 3}', '{"item": "pears", "quantity": 1}']
    assert [line.split(" ", 1)[1] for line in printed.splitlines() if line.endswith(("apples", "pears", "plums"))] == [
        "3 apples",
        "1 pears",
    ]
    printed = run_lines(NOTEBOOKS, environ)
    assert "Pending: 0." in printed
    assert re.search(r"committed +2$", printed, re.MULTILINE)
    assert re.search(r"orders-example +2 +1 ", printed)


def test_the_script_that_reads_prints_each_message_once(tmp_path: Path) -> None:
    [script] = re.findall(r"```python\n(.*?)```", SECTIONS["Read the results"], re.DOTALL)
    (tmp_path / "ship.py").write_text(script)
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    table = tmp_path / ".halfway" / "warehouse" / "messages"

    def printed() -> str:
        command = [sys.executable, "ship.py"]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    append(table, [row((0, 1), 1, body=b"3 apples"), row((0, 1), 2, topic="other"), row((0, 2), 3, body=b"1 pears")])
    assert printed() == "22:13:20  t1  3 apples\n22:13:20  t3  1 pears\n"
    append(table, [row((0, 3), 4, body=b"2 plums")])
    assert printed() == "22:13:20  t4  2 plums\n"


def test_the_page_shows_the_methods_of_the_example() -> None:
    core = re.findall(r"```python\n(.*?)```", PAGE[PAGE.index("## Listeners") :], re.DOTALL)[0]
    example = (ROOT / "examples" / "listener.py").read_text()
    methods = core.strip().split("\n\n")
    assert len(methods) == 3
    for method in methods:
        assert indent(method.strip(), "    ") in example


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_operators_commands_succeed(environ: dict[str, str], spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run them after a demo, whose silent group leaves discards, and with two pending orders.

    The job reads the orders, and then the verdicts, in this process, whose Spark is running.
    """
    printed = {}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    try:
        for line in ("halfway broker start", "halfway topics create", "halfway demo --messages 3"):
            done = shell(line, environ)
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        *places, status, pending, commit, rollback, dry_run, replay = OPERATE.splitlines()
        assert [shell(line, environ).returncode for line in places] == [0, CRASHED, CRASHED]
        sent = time.monotonic()
        until(lambda: time.monotonic() - sent > 2, "the age that `halfway pending --older-than 1s` asks for")
        settings = command_settings(None, ["trigger.available_now=true"])
        ResolveJob(settings).run(lambda: spark)
        pears, plums = (row["transaction_id"] for row in json.loads(shell("halfway pending --json", environ).stdout))
        commit, rollback = commit.replace("ID", pears), rollback.replace("ID", plums, 1)
        for line in (status, pending, commit, rollback, dry_run, replay):
            done = shell(line, environ)
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
            printed[line.split()[1]] = done.stdout
        ResolveJob(settings).run(lambda: spark)
        left = json.loads(CliRunner().invoke(app, ["pending", "--json"]).stdout)
    finally:
        shell("halfway broker stop", environ)
    assert pears in printed["pending"]
    assert plums in printed["pending"]
    messages = delta_rows(environ["HALFWAY__STORAGE__WAREHOUSE"] + "/messages", "SELECT transaction_id FROM rows")
    ids = [row["transaction_id"] for row in messages]
    assert (ids.count(pears), ids.count(plums)) == (1, 0)
    assert printed["replay"].startswith("2 resent, 0 already resent")
    assert {(row["producer_group"], row["incarnation"]) for row in left} == {("demo-silent", 1)}


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_the_commands_that_show_what_the_job_does_succeed(environ: dict[str, str], tmp_path: Path) -> None:
    """Run the job on another port than the README's, until its metrics show a batch."""
    doctor, resolve = OBSERVE.splitlines()
    port = free_port()
    metrics = f"http://127.0.0.1:{port}/metrics"

    def shows_a_batch() -> bool:
        try:
            with urllib.request.urlopen(metrics, timeout=5) as answer:
                return b"\nhalfway_half_messages 0.0\n" in answer.read()
        except OSError:
            return False

    try:
        for line in ("halfway broker start", "halfway topics create", doctor):
            done = shell(line, environ)
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        assert "✓ access" in done.stdout
        log = tmp_path / "job.log"
        with log.open("wb") as output:
            command = ["bash", "-c", f"exec {resolve.replace('9464', str(port))}"]
            job = subprocess.Popen(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            until(shows_a_batch, "the metrics of a batch")
        finally:
            job.send_signal(signal.SIGTERM)
            code = job.wait(60)
        assert code == 0, log.read_text()
        assert "event=batch" in log.read_text()
    finally:
        shell("halfway broker stop", environ)
