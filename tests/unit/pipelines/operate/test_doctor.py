"""The findings of `halfway doctor` that need neither Spark nor Kafka, and its output."""

import json
import socket
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pyspark
import pytest
from typer.testing import CliRunner

from halfway.conf.loader import load_settings
from halfway.pipelines.cli.app import app
from halfway.pipelines.cli.doctor import _odd_times
from halfway.pipelines.local.processes import free_port
from halfway.pipelines.operate.doctor import kafka_checks
from halfway.pipelines.operate.doctor import machine_checks as checks
from halfway.pipelines.operate.doctor.finding import Finding, Health
from halfway.pipelines.operate.doctor.storage_checks import storage_findings
from halfway.pipelines.resolve.metrics import JobMetrics
from halfway.pipelines.runtime.metrics_server import served
from halfway.pipelines.storage.delta_tables import Owner
from halfway.pipelines.storage.lineage import BatchOrigin
from halfway.pipelines.storage.local_ownership import local_history, read_local_ownership
from halfway.pipelines.storage.manifest import Manifest
from halfway.schemas.errors import SetupError
from halfway.schemas.settings import MetricsSettings
from halfway.schemas.state_format import FORMAT_VERSION
from halfway.schemas.tables import Table
from tests.support.commands import run_halfway
from tests.support.message_tables import append, row

pytestmark = pytest.mark.usefixtures("empty_directory")


def states(findings: list[Finding]) -> list[tuple[str, Health]]:
    return [(finding.check, finding.health) for finding in findings]


def test_everything_missing_is_reported_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    (tmp_path / "file").touch()
    places = [part for name in ("warehouse", "checkpoint") for part in ("--set", f"storage.{name}={tmp_path}/file/{name}")]
    result = CliRunner().invoke(app, ["doctor", "--json", *places])
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert answer["ok"] is False
    told = {each["check"]: (each["state"], each["text"]) for each in answer["checks"]}
    for check, state, way_out in [
        ("java", "problem", "install Java 17 or newer"),
        ("jars", "warning", "python -m halfway.pipelines.runtime.jars spark"),
        ("kafka", "problem", "halfway broker start"),
        ("topics", "unknown", "Kafka cannot be reached"),
        ("warehouse", "problem", "set storage.warehouse to another folder"),
        ("checkpoint", "problem", "set storage.checkpoint to another folder"),
    ]:
        assert told[check][0] == state, told[check]
        assert way_out in told[check][1]
    assert list(tmp_path.iterdir()) == [tmp_path / "file"], "nothing is left behind"


@pytest.mark.parametrize("by_environment", [False, True])
@pytest.mark.parametrize("by_command_line", [False, True])
def test_the_settings_are_overridden_by_what_is_set(monkeypatch: pytest.MonkeyPatch, by_environment: bool, by_command_line: bool) -> None:
    if by_environment:
        monkeypatch.setenv("HALFWAY__METRICS__PORT", "0")
    told = CliRunner().invoke(app, ["doctor", *(["--set", "state.buckets=3"] if by_command_line else [])]).stdout
    by = ["the environment"] * by_environment + ["the command line"] * by_command_line
    assert f"✓ settings   the defaults{', overridden by ' if by else ''}{' and '.join(by)}\n" in told


def test_settings_that_do_not_load_are_the_only_finding() -> None:
    result = CliRunner().invoke(app, ["doctor", "--set", "state.bucket=3"])
    assert result.exit_code == 1
    assert "✗ settings   --set state.bucket: unknown setting 'state.bucket'; did you mean buckets?\n" in result.stdout
    assert "? the rest   not checked" in result.stdout


def test_an_unreachable_kafka_is_reported_within_40_s_in_one_line_for_each_finding(tmp_path: Path) -> None:
    done = run_halfway("doctor", "--set", "kafka.bootstrap_servers=127.0.0.1:1", cwd=tmp_path, limit_s=40)
    assert (done.returncode, done.stderr) == (1, "")
    assert all(line[:2] in {"✓ ", "! ", "✗ ", "? "} for line in done.stdout.splitlines())
    [kafka] = [line for line in done.stdout.splitlines() if " kafka " in line]
    assert "Connection refused" in kafka
    assert kafka.endswith(": `halfway broker start --port 1` starts a local one")


@pytest.mark.parametrize(
    ("replicas", "in_sync", "min_in_sync", "told"),
    [
        (3, 3, 2, []),
        (0, 0, 1, []),
        (1, 1, 1, [(Health.WARNING, "one replica")]),
        (3, 3, 1, [(Health.WARNING, "min.insync.replicas=1")]),
        (3, 3, 3, [(Health.WARNING, "with one broker down nothing can be written")]),
        (3, 2, 2, [(Health.WARNING, "2 of 3 replicas in sync")]),
        (3, 1, 2, [(Health.PROBLEM, "takes no writes")]),
        (3, 0, 1, [(Health.PROBLEM, "takes no writes"), (Health.WARNING, "min.insync.replicas=1")]),
        (1, 1, 2, [(Health.PROBLEM, "set min.insync.replicas to at most 1"), (Health.WARNING, "one replica")]),
    ],
)
def test_a_topic_needs_replicas_in_sync(replicas: int, in_sync: int, min_in_sync: int, told: list[tuple[Health, str]]) -> None:
    found = list(kafka_checks.replica_problems("t", replicas, in_sync, min_in_sync))
    assert [state for state, _ in found] == [state for state, _ in told]
    assert all(part in text for (_, text), (_, part) in zip(found, told, strict=True))


def test_a_cluster_where_pyspark_and_delta_are_not_installed_has_them_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark brings PySpark, and Delta's JAR its package."""

    def version_of(name: str) -> str:
        if name == "confluent-kafka":
            return "2.0"
        raise PackageNotFoundError(name)

    monkeypatch.setattr(checks.metadata, "version", version_of)
    [found] = checks._python()
    assert found.health is Health.OK
    assert found.text.endswith(f"pyspark {pyspark.__version__}, confluent-kafka 2.0")


@pytest.mark.parametrize(
    ("problem_below", "warning_below", "state"), [(0, 0, Health.OK), (0, 2**62, Health.WARNING), (2**62, 2**62, Health.PROBLEM)]
)
def test_free_disk_space_is_judged(monkeypatch: pytest.MonkeyPatch, problem_below: int, warning_below: int, state: Health) -> None:
    monkeypatch.setattr(checks, "MIN_FREE_BYTES", problem_below)
    monkeypatch.setattr(checks, "LITTLE_FREE_BYTES", warning_below)
    found = list(checks.disk_findings(load_settings(environ={}).storage))
    assert states(found) == [("disk", state)] * 2
    assert ("storage.warehouse" in found[0].text) is (state is Health.PROBLEM)


def test_the_metrics_port_is_free_or_a_jobs_or_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = MetricsSettings(port=free_port())

    def found() -> tuple[Health, str]:
        [finding] = checks.metrics_findings(settings)
        return finding.health, finding.text

    assert [finding.text for finding in checks.metrics_findings(MetricsSettings())] == ["off: metrics.port is 0"]
    assert found()[0] is Health.OK
    assert "free" in found()[1]
    with served(JobMetrics(1), settings):
        assert found() == (Health.OK, f"a job serves them at http://127.0.0.1:{settings.port}/metrics")
    with socket.create_server(("127.0.0.1", settings.port)):
        state, text = found()
        assert state is Health.PROBLEM
        assert "set metrics.port to a free one" in text
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert found() == (
        Health.PROBLEM,
        "metrics.port needs prometheus-client, which is not installed: pip install '.[metrics]' in a clone of Halfway",
    )


def test_a_damaged_checkpoint_is_a_finding_and_no_traceback(tmp_path: Path) -> None:
    settings = load_settings(environ={}, overrides={"storage.warehouse": str(tmp_path / "w"), "storage.checkpoint": str(tmp_path / "c")})
    assert read_local_ownership(settings.storage).tables == {}
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "metadata").write_text("{")
    with pytest.raises(SetupError, match="cannot read the checkpoint"):
        read_local_ownership(settings.storage)
    assert states(list(storage_findings(settings))) == [("warehouse", Health.OK), ("checkpoint", Health.OK), ("ownership", Health.PROBLEM)]


@pytest.mark.parametrize("separator", ["\u2028", "\u0085", "\x1c"])
def test_an_id_with_another_line_separator_damages_no_table(separator: str, tmp_path: Path) -> None:
    """Delta writes the least and the greatest id of a file into its log as they are."""
    settings = load_settings(environ={}, overrides={"storage.warehouse": str(tmp_path / "w"), "storage.checkpoint": str(tmp_path / "c")})
    log = tmp_path / "w" / "messages" / "_delta_log"
    log.mkdir(parents=True)
    add = {"path": "p", "stats": json.dumps({"minValues": {"transaction_id": f"a{separator}b"}}, ensure_ascii=False)}
    actions = [{"metaData": {"configuration": {"halfway.query_id": "q"}}}, {"add": add}, {"commitInfo": {"operation": "WRITE"}}]
    (log / f"{0:020d}.json").write_text("".join(json.dumps(action, ensure_ascii=False) + "\n" for action in actions), "utf-8")
    assert read_local_ownership(settings.storage).queries() == {"q", None}
    assert [commit.operation for commit in local_history(settings.storage, "q", Table.MESSAGES).commits] == ["WRITE"]


def test_an_older_copy_of_a_checkpoint_is_found_without_spark(tmp_path: Path) -> None:
    """As after a backup was restored: the tables hold a batch that the checkpoint has not read."""
    settings = load_settings(environ={}, overrides={"storage.warehouse": str(tmp_path / "w"), "storage.checkpoint": str(tmp_path / "c")})
    offsets = [f'v1\n{{}}\n{{"half": {{"0": {batch}}}}}' for batch in range(3)]
    (tmp_path / "c" / "offsets").mkdir(parents=True)
    for batch, text in enumerate(offsets):
        (tmp_path / "c" / "offsets" / str(batch)).write_text(text)
    kafka, keys = settings.kafka, tuple(range(settings.state.buckets))
    manifest = Manifest(FORMAT_VERSION, "q", 0, len(keys), kafka.half_topic, kafka.op_topic, 0, {}, 60_000, keys, "", {}, "earliest")
    (tmp_path / "c" / "halfway.json").write_text(json.dumps(asdict(manifest)))
    (tmp_path / "c" / "metadata").write_text('{"id": "q"}')
    for table in Table:
        log = tmp_path / "w" / table / "_delta_log"
        log.mkdir(parents=True)
        created = {"metaData": {"configuration": Owner("q").properties()}}
        appended = {"commitInfo": {"userMetadata": BatchOrigin.of("q", 2, offsets[2]).to_json()}}
        for version, action in enumerate((created, appended, {"commitInfo": {}})):
            (log / f"{version:020}.json").write_text(json.dumps(action) + "\n")
    [*_, ownership] = storage_findings(settings)
    assert (ownership.health, ownership.text) == (Health.OK, "checkpoint and tables belong together")
    (tmp_path / "c" / "offsets" / "2").unlink()
    [*_, ownership] = storage_findings(settings)
    assert ownership.health is Health.PROBLEM
    assert "has not read what batch 2 of the table" in ownership.text
    assert "it is an older copy" in ownership.text


def test_tables_that_were_copied_as_data_are_found_without_spark(tmp_path: Path) -> None:
    settings = load_settings(environ={}, overrides={"storage.warehouse": str(tmp_path / "w"), "storage.checkpoint": str(tmp_path / "c")})
    for table in Table:
        append(tmp_path / "w" / table, [row((0, 1), 1)])
    [*_, ownership] = storage_findings(settings)
    assert ownership.health is Health.PROBLEM
    assert "not named: the table is a copy" in ownership.text


@pytest.mark.parametrize(
    ("job_keys", "health", "told"),
    [((), Health.PROBLEM, "has no job_keys"), (("j" * 32, "k" * 32), Health.WARNING, "is a group's key too")],
)
def test_a_job_without_a_key_of_its_own_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, job_keys: tuple[str, ...], health: Health, told: str
) -> None:
    """`halfway resolve` refuses the first: with a group's key its services could forge time."""
    monkeypatch.setattr(kafka_checks, "_reachable", lambda *_: iter(()))
    signing = {"kafka.signing.cluster": "c", "kafka.signing.keys": {"shop": "k" * 32}, "kafka.signing.job_keys": job_keys}
    findings = kafka_checks.kafka_findings(load_settings(environ={}, overrides=signing))
    assert [(each.health, told in each.text) for each in findings if each.check == "signing"] == [(health, True)]


@pytest.mark.parametrize(("half_retention", "warns"), [("72", True), ("72h", False), ("6s", False)])
def test_a_retention_of_ms_where_hours_were_meant_is_named(half_retention: str, warns: bool) -> None:
    times = load_settings(environ={}, overrides={"resolution.half_retention": half_retention}).resolution
    found = [finding.text for finding in _odd_times(times)]
    assert ["half_retention (72 ms) is shorter than transactionTimeOut (6000 ms)" in text for text in found] == [True] * warns
