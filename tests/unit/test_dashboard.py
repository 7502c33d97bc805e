"""The dashboard and the alert rules use metrics and labels that the server has."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import ProcessCollector

from server.core.metrics import Metrics

DOCS = Path(__file__).parents[2] / "docs"
SERIES = re.compile(r"\b((?:onequeue_|vllm:|process_)\w+)(?:\{([^}]*)\})?")
TARGET_LABELS = {"job", "instance"}  # of Prometheus


def expressions() -> list[str]:
    dashboard: dict[str, Any] = json.loads((DOCS / "grafana.json").read_text())
    rules: dict[str, Any] = yaml.safe_load((DOCS / "alerts.yaml").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return panels + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def known_series() -> dict[str, set[str]]:
    """Return the labels of each series."""
    metrics = Metrics(lambda: 0.0)
    known: dict[str, set[str]] = {}
    for collector, names in metrics.registry._collector_to_names.items():
        labels = {*getattr(collector, "_labelnames", ())}
        if isinstance(collector, ProcessCollector):
            names = [metric.name for metric in collector.collect()]
        known |= dict.fromkeys(names, labels | TARGET_LABELS)
    return known


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_uses_known_series_and_labels(expression: str) -> None:
    known, found = known_series(), SERIES.findall(expression)
    assert found or expression.startswith("up{")
    for name, matchers in found:
        assert name in known, name
        used = set(re.findall(r"(\w+)=", matchers))
        for group in re.findall(r"by \(([^)]*)\)", expression):
            used |= set(re.split(r",\s*", group)) - {"le"}
        assert used <= known[name], expression


def test_promtool_accepts_the_rules() -> None:
    if not (promtool := shutil.which("promtool")):
        pytest.skip("promtool is not installed")
    command = [promtool, "check", "rules", str(DOCS / "alerts.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
