"""What `pip install halfway` brings is small and enough for a service; the command says what to install for more."""

import subprocess
from pathlib import Path

import pytest

from tests.support.fresh_python import install
from tests.support.slim_python import brought_by, make_slim_python, requirements_of, size_of

MEGABYTE = 1_000_000
SERVICE = """
import sqlite3, sys
from halfway import SqlTransactions, TransactionProducer, load_settings
settings = load_settings(overrides={"kafka.bootstrap_servers": "127.0.0.1:1"})
TransactionProducer(settings.kafka, "order-service", SqlTransactions(lambda: sqlite3.connect("shop.db"))).close()
print(*sorted({"pandas", "pyarrow", "pyspark", "typer"} & sys.modules.keys()), "ready")
"""


def run(python: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    folder = python.parents[1]
    return subprocess.run([str(python), *arguments], cwd=folder, env={}, capture_output=True, text=True, check=False, timeout=120)


def test_a_service_brings_little() -> None:
    brought = brought_by(requirements_of()).keys()
    assert {"confluent-kafka", "pydantic", "pyyaml"} <= brought
    assert not brought & {"pandas", "pyarrow", "numpy", "pyspark", "typer", "rich"}
    assert size_of() < 25 * MEGABYTE


def test_a_service_runs_without_the_extras_and_the_command_says_what_to_install(wheel: Path, tmp_path: Path) -> None:
    python = make_slim_python(tmp_path / "slim")
    install(wheel, tmp_path / "slim")
    done = run(python, "-c", SERVICE)
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr
    done = run(python, "-m", "halfway", "status")
    told = "error: the command needs typer, which is not installed: pip install '.[job]' in a clone of Halfway\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_the_job_without_spark_says_so(wheel: Path, tmp_path: Path) -> None:
    """On Databricks and on a cluster Spark is there; elsewhere it is an extra of its own."""
    python = make_slim_python(tmp_path / "job", "job")
    install(wheel, tmp_path / "job")
    for command in ("--help", "broker status", "transactions ddl"):
        assert run(python, "-m", "halfway", *command.split()).returncode == 0
    without_spark = {
        "status": "pyspark",
        "pending": "pyspark",
        "resolve --set kafka.bootstrap_servers=127.0.0.1:1": "pyspark",
        "optimize": "pyspark",
        "doctor": "pyspark",
    }
    for command, package in without_spark.items():
        done = run(python, "-m", "halfway", *command.split())
        told = f"error: this command needs {package}, which is not installed: pip install '.[job,spark]' in a clone of Halfway\n"
        assert (done.returncode, done.stderr) == (1, told)


@pytest.mark.parametrize(
    ("extras", "modules"),
    [
        (("job", "spark"), "pyspark.sql, delta, pandas"),
        (("job", "spark", "metrics"), "prometheus_client"),
        (("job", "spark", "otel"), "opentelemetry.trace"),
        (("job", "spark", "tables"), "deltalake, duckdb"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "modules",
)
def test_with_job_and_spark_the_command_runs(wheel: Path, tmp_path: Path, extras: tuple[str, ...], modules: str) -> None:
    python = make_slim_python(tmp_path / "job", *extras)
    install(wheel, tmp_path / "job")
    done = run(python, "-m", "halfway", "--help")
    assert done.returncode == 0, done.stderr
    assert "resolve" in done.stdout
    assert run(python, "-c", f"import {modules}").returncode == 0
