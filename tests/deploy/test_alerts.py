"""The alerts, as Prometheus itself evaluates them: each fires when its text says, and not without its cause."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.promtool import promtool

FOLDER = ROOT / "monitoring"


def run(*arguments: str | Path, folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool(), *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=60)


def test_prometheus_accepts_the_rules() -> None:
    done = run("check", "rules", "alerts.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_say_and_not_without_cause() -> None:
    done = run("test", "rules", "alerts.test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_seen_to_fire_and_not_to_fire() -> None:
    alerts = {rule["alert"] for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]}
    cases = [case for test in yaml.safe_load((FOLDER / "alerts.test.yml").read_text())["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == alerts
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == alerts


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("> 300\n", "> 900\n"),
        ("5 minutes", "an hour"),
        ("unless max", "and max"),
        ("(instance, pod)", "(instance)"),
        ("[1d]", "[2h]"),
        ("> 0\n", "> -1\n"),
        ("_total offset 15m)", "_total offset 1m)"),
        ("last_over_time(halfway_horizon_lag_seconds[5m])", "halfway_horizon_lag_seconds"),
        ("last_over_time(halfway_relay_lag_seconds[2m])", "halfway_relay_lag_seconds"),
        ("time() - max without (instance, pod) (", "time() - sum without (instance, pod) ("),
        ("absent_over_time(halfway_last_batch_timestamp_seconds[1d])", "absent_over_time(halfway_last_batch_timestamp_seconds[5m])"),
    ],
)
def test_a_wrong_alert_is_noticed(right: str, wrong: str, tmp_path: Path) -> None:
    text = (FOLDER / "alerts.yml").read_text()
    assert right in text
    (tmp_path / "alerts.yml").write_text(text.replace(right, wrong))
    (tmp_path / "alerts.test.yml").write_text((FOLDER / "alerts.test.yml").read_text())
    assert run("test", "rules", "alerts.test.yml", folder=tmp_path).returncode != 0
