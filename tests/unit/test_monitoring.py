"""The alert rules, the dashboard and the manual name the metrics that the job and a relay really have."""

import json
import re
from types import SimpleNamespace
from typing import Any

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from halfway.pipelines.relay.active_relay import RelayReport
from halfway.pipelines.relay.relay_metrics import RelayMetrics
from halfway.pipelines.resolve.metrics import JobMetrics
from tests.support.paths import ROOT


def exposed_metrics() -> dict[str, str]:
    """Return the type of each metric by its name."""
    relay: Any = SimpleNamespace(report=RelayReport())
    registry = CollectorRegistry()
    registry.register(JobMetrics(1))
    registry.register(RelayMetrics(relay))
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", generate_latest(registry).decode(), re.MULTILINE))


METRICS = exposed_metrics()


def metrics_in(expression: str) -> set[str]:
    """Return the metrics that a query names."""
    return set(re.findall(r"\b[a-z]+_[a-z_]+\b(?=\s*[\[{)]|\s*$|\s+[-+*/<>=!]|\s+(?:or|and|unless)\b)", expression)) - {"label_replace"}


def samples_of(metrics: dict[str, str]) -> set[str]:
    return {name + suffix for name, kind in metrics.items() for suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))}


def test_alert_rules_query_existing_metrics_and_name_their_runbook() -> None:
    rules = yaml.safe_load((ROOT / "monitoring" / "alerts.yml").read_text())
    headings = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    }
    assert list(rules) == ["groups"]
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert len(alerts) == len({alert["alert"] for alert in alerts}) == 10
    for group in rules["groups"]:
        assert set(group) <= {"name", "interval", "rules"}
    for alert in alerts:
        assert set(alert) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", alert["for"])
        assert alert["labels"]["severity"] in {"critical", "warning"}
        assert set(alert["annotations"]) == {"summary", "description", "runbook"}
        names = metrics_in(alert["expr"])
        assert names, alert
        assert names <= samples_of(METRICS), alert
        page, anchor = alert["annotations"]["runbook"].split("#")
        assert page == "docs/operations.md"
        assert anchor in headings


def test_the_dashboard_queries_existing_metrics_and_shows_all_of_them() -> None:
    dashboard = json.loads((ROOT / "monitoring" / "grafana-dashboard.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    names = {name for expression in expressions for name in metrics_in(expression)}
    assert names <= samples_of(METRICS)
    shown = {name for name in METRICS if any(asked.startswith(name) for asked in names)}
    assert shown == set(METRICS)
    for panel in panels:
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


def test_the_manual_describes_every_metric_and_alert() -> None:
    manual = (ROOT / "docs" / "operations.md").read_text()
    assert [name for name in METRICS if f"`{name}`" not in manual and f"`{name}{{" not in manual] == []
    rules = yaml.safe_load((ROOT / "monitoring" / "alerts.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert f"### {rule['alert']}" in manual
