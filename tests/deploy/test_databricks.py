"""The bundle for Databricks: it fits Databricks' own model, what it names exists, and its targets share nothing."""

import re
from collections.abc import Iterator
from configparser import ConfigParser
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from databricks.bundles.jobs import Job

from halfway.conf.loader import load_settings
from halfway.pipelines.cli.app import app, task
from halfway.pipelines.local.command_settings import command_settings
from halfway.pipelines.runtime.session import refuse_connect
from halfway.pipelines.storage.file_systems import local_path
from halfway.schemas.errors import HalfwayError, SettingsError, SetupError
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "databricks.md").read_text()
BUNDLE: dict[str, Any] = yaml.safe_load((ROOT / "databricks.yml").read_text())
FILES = [path for pattern in BUNDLE["include"] for path in sorted(ROOT.glob(pattern))]
JOBS: dict[str, Any] = {name: job for path in FILES for name, job in yaml.safe_load(path.read_text())["resources"]["jobs"].items()}
CLUSTERS = {name: {each["job_cluster_key"]: each["new_cluster"] for each in job["job_clusters"]} for name, job in JOBS.items()}
TASKS = [(name, each) for name, job in JOBS.items() for each in job["tasks"]]
by_task = pytest.mark.parametrize("wheel_task", [each for _, each in TASKS], ids=[name for name, _ in TASKS])
by_job = pytest.mark.parametrize(("job", "wheel_task"), TASKS, ids=[name for name, _ in TASKS])


TARGETS: dict[str, Any] = BUNDLE["targets"]
by_target = pytest.mark.parametrize("target", TARGETS)
THEIR_OWN = {"catalog_schema", "checkpoint", "topics"}
"""The variables that say where a job reads and writes."""


def resolved(text: str, target: str = "prod", user: str = "ann") -> str:
    """Replace `${…}` as Databricks does: variables by the target's value or their defaults."""
    variables = {name: variable.get("default", f"some-{name}") for name, variable in BUNDLE["variables"].items()}
    variables |= {"state_location": "s3://bucket/halfway", "bootstrap_servers": "some-kafka:9092"}
    known = {f"var.{name}": str(value) for name, value in (variables | TARGETS[target].get("variables", {})).items()}
    known |= {
        "workspace.file_path": str(ROOT),
        "workspace.current_user.short_name": user,
        "bundle.target": target,
        "bundle.name": "halfway",
    }
    while (with_values := re.sub(r"\$\{([^}]*)\}", lambda found: known[found[1]], text)) != text:
        text = with_values
    return text


def required(target: str) -> set[str]:
    """Return the variables that whoever deploys this target has to set."""
    return {name for name, variable in BUNDLE["variables"].items() if "default" not in variable} - TARGETS[target]["variables"].keys()


def strings(node: Any) -> Iterator[str]:
    if isinstance(node, dict | list):
        for inner in node.values() if isinstance(node, dict) else node:
            yield from strings(inner)
    elif isinstance(node, str):
        yield node


@pytest.mark.parametrize("name", JOBS)
def test_jobs_fit_the_model_of_databricks(name: str) -> None:
    assert Job.from_dict(JOBS[name]).name == JOBS[name]["name"]
    with pytest.raises(ValueError, match="Unexpected field 'continous'"):
        Job.from_dict(JOBS[name] | {"continous": {}})


def test_every_variable_is_defined_and_used() -> None:
    used = {name for text in strings([JOBS, TARGETS]) for name in re.findall(r"\$\{var\.(\w+)\}", text)}
    assert used == set(BUNDLE["variables"])


def test_targets_and_the_users_of_dev_share_no_tables_no_checkpoint_and_no_topics() -> None:
    who = [("prod", "ann"), ("dev", "ann"), ("dev", "bob")]
    for name in THEIR_OWN:
        values = [resolved(f"${{var.{name}}}", target, user) for target, user in who]
        assert len(set(values)) == len(who), values


def test_two_people_who_deploy_prod_make_one_job() -> None:
    assert TARGETS["prod"]["workspace"]["root_path"].startswith("/Workspace/Users/${var.service_principal}/"), "nobody else writes there"
    assert "current_user" not in TARGETS["prod"]["workspace"]["root_path"]
    assert TARGETS["prod"]["run_as"] == {"service_principal_name": "${var.service_principal}"}
    assert [job["max_concurrent_runs"] for job in JOBS.values()] == [1] * len(JOBS)


def test_a_target_in_development_mode_pauses_every_trigger() -> None:
    """Databricks pauses only the triggers that do not say themselves whether they are paused."""
    assert TARGETS["dev"]["mode"] == "development"
    triggers = [job.get("continuous") or job["schedule"] for job in JOBS.values()]
    assert [trigger for trigger in triggers if "pause_status" in trigger] == []


@by_target
def test_the_page_sets_every_variable_without_a_value(target: str) -> None:
    [block] = [text for text in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if f"bundle deploy -t {target}" in text]
    assert set(re.findall(r"BUNDLE_VAR_(\w+)=", block)) == required(target)
    assert f"bundle run -t {target} halfway_resolve" in block or target == "prod"


def test_a_shuffle_partition_for_each_core_of_the_default_cluster() -> None:
    cores_of_the_default_node = {"i3.xlarge": 4}[BUNDLE["variables"]["node_type_id"]["default"]]
    secrets = {"HALFWAY__KAFKA__SECURITY__USER": "u", "HALFWAY__KAFKA__SECURITY__PASSWORD": "p"}
    state = load_settings(ROOT / "conf" / "databricks.yaml", environ=secrets).state
    assert state.shuffle_partitions == cores_of_the_default_node * BUNDLE["variables"]["num_workers"]["default"]


@by_task
def test_package_and_entry_point_are_those_of_the_wheel(wheel_task: dict[str, Any]) -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    python_task = wheel_task["python_wheel_task"]
    assert python_task["package_name"] == setup["metadata"]["name"]
    points = dict(line.split(" = ") for line in setup["options.entry_points"]["databricks"].strip().splitlines())
    assert EntryPoint(python_task["entry_point"], points[python_task["entry_point"]], "databricks").load() is task
    wheel, *packages = wheel_task["libraries"]
    assert (FILES[0].parent / wheel["whl"]).resolve() == ROOT / "dist" / "*.whl"
    of_the_job = setup["options.extras_require"]["job"].splitlines()
    assert [library["pypi"]["package"] in of_the_job for library in packages] == [True, True]


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
        assert settings.kafka.servers() == "some-kafka:9092"
        assert settings.storage.checkpoint == "s3://bucket/halfway/prod"
        assert (settings.kafka.half_topic, settings.kafka.check_topic) == ("transactions.half", "transactions.check")
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


def test_a_volume_is_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume refuses appends, so that no lock can be held there."""
    volume = "/Volumes/main/halfway/state/checkpoint"
    assert local_path(volume) == Path(volume)
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "19.0")
    assert local_path(volume) is None


def test_a_task_returns_when_its_command_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    task(["broker", "status", "--json"])
    assert "bootstrap_servers" in capsys.readouterr().out


def test_a_task_raises_an_error_when_its_command_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HalfwayError, match="exit code 1"):
        task(["resolve", "--set", "kafka.bootstrap_server=x"])
    assert "did you mean bootstrap_servers?" in capsys.readouterr().err
    assert issubclass(SettingsError, HalfwayError)
