"""What `halfway demo` prints while it waits."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfway.pipelines.cli.app import app
from halfway.pipelines.cli.demo import _is_of_this_machine, _ProgressLines
from halfway.pipelines.demo.run import DemoCounts, DemoProgress
from tests.support.commands import as_options


def test_a_line_that_stands_still_is_rarer(capsys: pytest.CaptureFixture[str]) -> None:
    show, nothing = _ProgressLines(), DemoProgress(0, 20, DemoCounts(), 0)
    for second in range(80):
        # It sends for 20 s, waits until 60 s, and then one is committed each second.
        found = DemoCounts(committed=max(0, second - 60))
        show(replace(nothing, sent=min(second, 20), found=found, seconds=float(second)))
    seconds = [int(line.rpartition("=")[2]) for line in capsys.readouterr().out.splitlines()]
    assert seconds == [0, 5, 10, 15, 20, 40, 60, 65, 70, 75]


@pytest.mark.parametrize("servers", ["localhost:9092", "127.0.0.1:1,[::1]:2", "PLAINTEXT://127.0.0.2:9092"])
def test_a_kafka_of_this_machine_is_one_for_development(servers: str) -> None:
    assert _is_of_this_machine(servers)


@pytest.mark.parametrize("servers", ["kafka:9092", "localhost:9092,kafka:9092", "127.example.org.:1", "localhost.example.org:9092"])
def test_no_job_is_started_on_the_kafka_of_others(servers: str, tmp_path: Path) -> None:
    """It would ask their services, and discard their messages, by the demo's times."""
    places = {f"storage.{name}": str(tmp_path / name) for name in ("checkpoint", "warehouse")}
    refused = CliRunner().invoke(app, ["demo", *as_options({"kafka.bootstrap_servers": servers, **places})])
    assert refused.exit_code == 1
    assert "give --own-job if that Kafka is for development" in refused.stderr
    assert not [*tmp_path.iterdir()]
