"""The server of metrics."""

import sys

import pytest
from typer.testing import CliRunner

from halfway.pipelines.cli.app import app
from halfway.pipelines.local.processes import free_port
from halfway.pipelines.resolve.metrics import JobMetrics
from halfway.pipelines.runtime.metrics_server import served
from halfway.schemas.errors import SetupError
from halfway.schemas.settings import MetricsSettings


def test_a_taken_port_is_reported_in_one_line_before_the_job_starts() -> None:
    metrics = JobMetrics(1)
    settings = MetricsSettings(port=free_port())
    with served(metrics, settings):
        result = CliRunner().invoke(
            app, ["resolve", "--set", f"metrics.port={settings.port}", "--set", "kafka.bootstrap_servers=127.0.0.1:1"]
        )
        assert result.exit_code == 1
        assert result.stderr == (
            f"error: metrics.port {settings.port} of 127.0.0.1 is taken by another process: end that process, or set metrics.port to a "
            "free one (0: no metrics)\n"
        )
    with served(metrics, settings):
        pass  # free again
    with pytest.raises(SetupError, match="cannot be listened on"), served(metrics, MetricsSettings(port=settings.port, host="192.0.2.1")):
        pass


def test_without_prometheus_client_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "halfway.pipelines.runtime.metrics_server")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    result = CliRunner().invoke(app, ["resolve", "--set", "metrics.port=1", "--set", "kafka.bootstrap_servers=127.0.0.1:1"])
    assert (result.exit_code, result.stderr) == (
        1,
        "error: metrics.port needs prometheus_client, which is not installed: pip install '.[metrics]' in a clone of Halfway\n",
    )
