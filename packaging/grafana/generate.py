#!/usr/bin/env python3
"""Writes the Grafana dashboards from `panels.py`. A test compares what it writes with what is committed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from panels import DASHBOARDS, Dashboard, Panel

TARGET = Path(__file__).resolve().parent / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
VARIABLES = {
    "instance": ("Node", "label_values(prefetchd_build_info, instance)"),
    "job": ("Training job", 'label_values(prefetchd_health_score{instance=~"$instance"}, job)'),
    "device": ("Device", 'label_values(prefetchd_pool_capacity_ratio{instance=~"$instance"}, device)'),
}
PANEL_HEIGHT, STAT_HEIGHT, COLUMNS = 8, 4, 24


def main() -> int:
    """Write one file per dashboard."""
    parser = argparse.ArgumentParser(
        description="Write the Grafana dashboards.", epilog="example: packaging/grafana/generate.py --output /tmp"
    )
    parser.add_argument("--output", type=Path, default=TARGET, help="folder for the files")
    output = parser.parse_args().output
    try:
        output.mkdir(parents=True, exist_ok=True)
        for dashboard in DASHBOARDS:
            (output / f"{dashboard.name}.json").write_text(render(dashboard), encoding="utf-8")
    except OSError as error:
        print(f"generate.py: {error.filename!r} cannot be written ({error.strerror}); give --output another folder.",
              file=sys.stderr)  # fmt: skip
        return 1
    return 0


def render(dashboard: Dashboard) -> str:
    """The dashboard as it is committed."""
    return json.dumps(document(dashboard), indent=2) + "\n"


def document(dashboard: Dashboard) -> dict[str, Any]:
    """Grafana's model of a dashboard (schema version 39, Grafana 10.4 and newer)."""
    return {
        "uid": f"prefetchd-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.text,
        "tags": ["prefetchd"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [
            {"type": "dashboards", "title": "prefetchd", "tags": ["prefetchd"], "asDropdown": True, "keepTime": True}
        ],
        "templating": {"list": [_datasource(), *(_variable(name) for name in dashboard.variables)]},
        "panels": list(_panels(dashboard)),
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}}


def _variable(name: str) -> dict[str, Any]:
    label, query = VARIABLES[name]
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    """Rows from top to bottom, panels in a row from left to right, wrapped at the last column."""
    number = top = 0
    for row in dashboard.rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
        }
        top += 1
        left, height = 0, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top = 0, top + height
            number += 1
            height = STAT_HEIGHT if panel.kind == "stat" else PANEL_HEIGHT
            position = {"x": left, "y": top, "w": panel.width, "h": height}
            yield {"id": number, "gridPos": position, **_panel(panel)}
            left += panel.width
        top += height


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "mappings": _mappings(panel.states or {}), "custom": _style(panel)}
    if panel.maximum is not None:
        defaults |= {"min": 0, "max": panel.maximum}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel.kind),
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "instant": panel.kind == "stat",
                "range": panel.kind != "stat",
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _mappings(states: dict[int, tuple[str, str]]) -> list[dict[str, Any]]:
    if not states:
        return []
    options = {str(value): {"text": text, "color": colour} for value, (text, colour) in states.items()}
    return [{"type": "value", "options": options}]


def _style(panel: Panel) -> dict[str, Any]:
    if panel.kind != "timeseries":
        return {}
    stacking = {"mode": "normal" if panel.stacked else "none"}
    return {"lineWidth": 1, "fillOpacity": 30 if panel.stacked else 0, "stacking": stacking, "showPoints": "never"}


def _options(kind: str) -> dict[str, Any]:
    if kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "none"}
    if kind == "state-timeline":
        return {"showValue": "auto", "mergeValues": True, "legend": {"displayMode": "list", "placement": "bottom"}}
    return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}


if __name__ == "__main__":
    sys.exit(main())
