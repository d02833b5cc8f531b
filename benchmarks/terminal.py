"""Draws the pictures of docs/pictures: `make pictures`. What terminals show comes from a real run, in build/pictures.

It runs `make run`, then a job beside which two services leave transactions pending, and the commands that look at it.
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any

from rich.console import Console
from rich.text import Text

from benchmarks import beside_peer
from halfway import TransactionProducer
from halfway.pipelines.demo.traffic import SilentListener
from halfway.pipelines.runtime.paths import home
from halfway.schemas.settings import KafkaSettings
from tests.support.paths import ROOT
from tests.support.signals import end_at_sigterm
from tests.support.waiting import until

OUT = ROOT / "docs" / "pictures"
_HOME = ROOT / "build" / "pictures"
_SHOWN_AT = 0.6
"""The width of a picture as shown, of that as drawn."""
_ENVIRON = {
    "HALFWAY_HOME": str(_HOME),
    "HALFWAY__STORAGE__WAREHOUSE": str(_HOME / "warehouse"),
    "HALFWAY__STORAGE__CHECKPOINT": str(_HOME / "checkpoint"),
}
# Time enough that nothing is discarded while the pictures are taken.
_PATIENT = {"HALFWAY__RESOLUTION__TRANSACTIONCHECKINTERVAL": "5s", "HALFWAY__RESOLUTION__TRANSACTIONCHECKMAX": "100"}
_TERMINAL = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "100"}
_RUN_LIMIT_S = 400
_AWAY_LIMIT_S = 200


def picture(name: str, command: str, output: str) -> None:
    """Write a picture of a terminal that shows a command and its output, which may have colours."""
    text = Text.from_ansi(masked(output).strip("\n"))
    shown = f"$ {command}"
    console = Console(record=True, width=max(map(len, (shown, *text.plain.splitlines()))) + 1, file=io.StringIO())
    console.print(Text(shown, style="bold"))
    console.print(text, soft_wrap=True)
    svg = console.export_svg(title=command, unique_id=name)
    # A picture loads no font from elsewhere.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    # Of its own width, so that the letters of a narrow picture are not larger than those of a wide one.
    svg = re.sub(r'viewBox="0 0 (\S+) ', lambda found: f'width="{float(found[1]) * _SHOWN_AT:.0f}" {found[0]}', svg, count=1)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{name}.svg").write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


def masked(output: str) -> str:
    """Return what a command prints as it would print it in a checkout called `halfway`, with its data in `.halfway`."""
    return output.replace(str(_HOME), f"{ROOT}/.halfway").replace(str(ROOT), "~/halfway").replace(str(Path.home()), "~")


def _shown(command: Sequence[str], environ: dict[str, str]) -> str:
    started_s = time.monotonic()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_RUN_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    sys.stderr.write(f"{time.monotonic() - started_s:.1f} s: {' '.join(command)}\n")
    return done.stdout


def _halfway(*arguments: str, environ: dict[str, str] | None = None) -> str:
    return _shown([sys.executable, "-m", "halfway", *arguments], environ or {})


@contextmanager
def _job() -> Iterator[Callable[[], str]]:
    """Run the broker and the job until the block ends, and yield what returns the job's log."""
    _halfway("broker", "start")
    log = _HOME / "job.log"
    try:
        _halfway("topics", "create")
        with log.open("wb") as to:
            job = subprocess.Popen([sys.executable, "-m", "halfway", "resolve"], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=to, stderr=to)
        try:
            yield log.read_text
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait(60)
    finally:
        _halfway("broker", "stop")


@contextmanager
def _sending(group: str, topic: str, ids: Sequence[str]) -> Iterator[None]:
    """Run a service that has sent these transactions, until the block ends."""
    servers = json.loads(_halfway("broker", "status", "--json"))["bootstrap_servers"]
    with TransactionProducer(KafkaSettings(bootstrap_servers=servers), group, SilentListener()) as producer:
        for transaction_id in ids:
            producer.send_in_transaction(topic, b"{}", transaction_id=transaction_id)
        yield


def main() -> None:
    """Take all pictures."""
    beside_peer.draw((ROOT / beside_peer.PAGE).read_text(), OUT / "beside_rocketmq.svg")
    jars = home() / "jars"
    rmtree(_HOME, ignore_errors=True)
    _HOME.mkdir(parents=True)
    (_HOME / "jars").symlink_to(jars.resolve())
    os.environ.update(_ENVIRON)
    end_at_sigterm()
    picture("run", "make run", _shown(["make", "--no-print-directory", "run"], {}))
    os.environ.update(_PATIENT)
    with _job() as log:
        until(lambda: "event=batch" in log(), "the job's first batch")
        with _sending("invoice-service", "invoices", ["invoice-2041", "invoice-2042"]):
            # Kafka knows a group only once it has read.
            until(lambda: _are_asked("invoice-service"), "checks of the group that is to leave")
        with _sending("order-service", "orders", ["order-7001", "order-7002", "order-7003"]):
            until(lambda: _are_asked("order-service"), "checks of what is pending")
            until(lambda: all("away" in row["waits_for"] for row in _pending("invoice-service")), "the group is away", _AWAY_LIMIT_S)
            for name in ("pending", "status", "doctor"):
                picture(name, f"halfway {name}", _halfway(name, environ=_TERMINAL))


def _are_asked(group: str) -> bool:
    found = _pending(group)
    return bool(found) and all(row["check_times"] for row in found)


def _pending(group: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "halfway", "pending", "--json", "--group", group]
    found: list[dict[str, Any]] = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    return found


if __name__ == "__main__":
    main()
