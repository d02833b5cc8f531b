"""The bundle for Databricks: what it names exists, and Halfway accepts its command lines and environment."""

import re
from collections.abc import Iterator
from configparser import ConfigParser
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from halfway.conf.loader import load_settings
from halfway.pipelines.cli.app import app, task
from halfway.pipelines.local.command_settings import command_settings
from halfway.pipelines.runtime.session import refuse_connect
from halfway.schemas.errors import HalfwayError, SettingsError, SetupError
from tests.support.paths import ROOT

BUNDLE: dict[str, Any] = yaml.safe_load((ROOT / "databricks.yml").read_text())
FILES = [path for pattern in BUNDLE["include"] for path in sorted(ROOT.glob(pattern))]
JOBS: dict[str, Any] = {name: job for path in FILES for name, job in yaml.safe_load(path.read_text())["resources"]["jobs"].items()}
CLUSTERS = {name: {each["job_cluster_key"]: each["new_cluster"] for each in job["job_clusters"]} for name, job in JOBS.items()}
TASKS = [(name, each) for name, job in JOBS.items() for each in job["tasks"]]
by_task = pytest.mark.parametrize("wheel_task", [each for _, each in TASKS], ids=[name for name, _ in TASKS])
by_job = pytest.mark.parametrize(("job", "wheel_task"), TASKS, ids=[name for name, _ in TASKS])


def resolved(text: str) -> str:
    """Replace `${…}` as Databricks does: variables by their defaults, the workspace's files by the source tree."""

    def value(found: re.Match[str]) -> str:
        kind, _, name = found[1].partition(".")
        if kind == "var":
            return str(BUNDLE["variables"][name].get("default", f"some-{name}"))
        return {"workspace.file_path": str(ROOT)}[found[1]]

    return re.sub(r"\$\{([^}]*)\}", value, text)


def strings(node: Any) -> Iterator[str]:
    if isinstance(node, dict | list):
        for inner in node.values() if isinstance(node, dict) else node:
            yield from strings(inner)
    elif isinstance(node, str):
        yield node


def test_every_variable_is_defined_and_used() -> None:
    used = {name for text in strings(JOBS) for name in re.findall(r"\$\{var\.(\w+)\}", text)}
    assert used == set(BUNDLE["variables"])


@by_task
def test_package_and_entry_point_are_those_of_the_wheel(wheel_task: dict[str, Any]) -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    python_task = wheel_task["python_wheel_task"]
    assert python_task["package_name"] == setup["metadata"]["name"]
    points = dict(line.split(" = ") for line in setup["options.entry_points"]["databricks"].strip().splitlines())
    assert EntryPoint(python_task["entry_point"], points[python_task["entry_point"]], "databricks").load() is task
    [library] = wheel_task["libraries"]
    assert (FILES[0].parent / library["whl"]).resolve() == ROOT / "dist" / "*.whl"


@by_job
def test_parameters_are_a_valid_command_line_and_the_settings_load(
    job: str, wheel_task: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # a task does not run in the source tree
    cluster = CLUSTERS[job][wheel_task["job_cluster_key"]]
    for name, value in cluster.get("spark_env_vars", {}).items():
        monkeypatch.setenv(name, resolved(value))
    command, *arguments = (resolved(text) for text in wheel_task["python_wheel_task"]["parameters"])
    group = typer.main.get_command(app)
    options = group.commands[command].make_context(command, arguments).params  # type: ignore[attr-defined]
    settings = command_settings(options["config"], options["overrides"])
    assert settings.storage.catalog_schema == "main.halfway"
    if command == "resolve":
        assert settings.kafka.servers() == "some-bootstrap_servers"
        assert settings.storage.checkpoint == "/Volumes/main/halfway/state/checkpoint"
        assert settings.kafka.security.user == "some-kafka_user"
        assert settings.kafka.security.password is not None
        assert settings.kafka.security.password.get_secret_value() == "{{secrets/halfway/kafka-password}}"


@by_job
def test_clusters_give_access_to_the_jvm(job: str, wheel_task: dict[str, Any]) -> None:
    assert CLUSTERS[job][wheel_task["job_cluster_key"]]["data_security_mode"] == "DATA_SECURITY_MODE_DEDICATED"
    with pytest.raises(SetupError, match="DATA_SECURITY_MODE_DEDICATED"):
        refuse_connect(object())  # type: ignore[arg-type]


def test_the_jobs_cluster_redacts_the_same_options_as_other_clusters() -> None:
    line = f"spark.redaction.regex {CLUSTERS['halfway_resolve']['resolve']['spark_conf']['spark.redaction.regex']}"
    assert line in [" ".join(each.split()) for each in (ROOT / "conf" / "spark-defaults.conf").read_text().splitlines()]


def test_the_defaults_equal_those_of_conf_databricks_yaml() -> None:
    secrets = {"HALFWAY__KAFKA__SECURITY__USER": "u", "HALFWAY__KAFKA__SECURITY__PASSWORD": "p"}
    storage = load_settings(ROOT / "conf" / "databricks.yaml", environ=secrets).storage
    variables = BUNDLE["variables"]
    assert (storage.catalog_schema, storage.checkpoint) == (variables["catalog_schema"]["default"], variables["checkpoint"]["default"])


def test_a_task_returns_when_its_command_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    task(["broker", "status", "--json"])
    assert "bootstrap_servers" in capsys.readouterr().out


def test_a_task_raises_an_error_when_its_command_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HalfwayError, match="exit code 1"):
        task(["resolve", "--set", "kafka.bootstrap_server=x"])
    assert "did you mean bootstrap_servers?" in capsys.readouterr().err
    assert issubclass(SettingsError, HalfwayError)
