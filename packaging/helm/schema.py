#!/usr/bin/env python3
"""Writes the chart's values.schema.json; its part on `config` is made from the agent's own configuration types.

Run it after a change of `agent/config.py` or of this file: a test compares what it writes with what is committed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from agent.config import ByteRate, Config

TARGET = Path(__file__).resolve().parent / "prefetchd" / "values.schema.json"
STRING: dict[str, Any] = {"type": "string"}
BOOLEAN: dict[str, Any] = {"type": "boolean"}
FREE: dict[str, Any] = {"type": "object"}
FREE_LIST: dict[str, Any] = {"type": "array", "items": {"type": "object"}}
LABELS: dict[str, Any] = {"type": "object", "additionalProperties": STRING}
DURATION: dict[str, Any] = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}
RATE = r"^\s*[0-9]+(\.[0-9]*)?\s*[kmgtKMGT]?[iI]?[bB]?(/[sS])?\s*$"
"""What `ByteRate.parse` takes for a text."""
NAME: dict[str, Any] = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"}


def main() -> int:
    """Write the schema, or print it with `--print`."""
    parser = argparse.ArgumentParser(
        description="Write values.schema.json of the Helm chart.",
        epilog="example: PYTHONPATH=. packaging/helm/schema.py",
    )
    parser.add_argument("--print", action="store_true", help="print the schema instead of writing it")
    text = render()
    if parser.parse_args().print:
        sys.stdout.write(text)
    else:
        TARGET.write_text(text, encoding="utf-8")
    return 0


def render() -> str:
    """The schema as it is committed."""
    return json.dumps(schema(), indent=2, sort_keys=True) + "\n"


def schema() -> dict[str, Any]:
    """JSON schema of the chart's values."""
    (config,), definitions = msgspec.json.schema_components(
        [Config], schema_hook=_schema_hook, ref_template="#/$defs/{name}"
    )
    values = _closed(
        image=_closed(
            repository={"type": "string", "minLength": 1},
            tag=STRING,
            pullPolicy={"enum": ["Always", "IfNotPresent", "Never"]},
        ),
        imagePullSecrets=FREE_LIST,
        config=config,
        podLabels=_closed(enabled=BOOLEAN),
        hostNetwork=BOOLEAN,
        port={"type": "integer", "minimum": 1, "maximum": 65535},
        tls=_closed(secretName=NAME, requireClientCertificate=BOOLEAN),
        basicAuth=_closed(secretName=NAME),
        serviceAccount=_closed(create=BOOLEAN, name=NAME, annotations=LABELS),
        rbac=_closed(create=BOOLEAN),
        priorityClassName=STRING,
        nodeSelector=LABELS,
        affinity=FREE,
        tolerations=FREE_LIST,
        maxUnavailable={"oneOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": "^[0-9]+%$"}]},
        terminationGracePeriodSeconds={"type": "integer", "minimum": 5},
        resources=FREE,
        podAnnotations=LABELS,
        extraEnv=FREE_LIST,
        service=_closed(enabled=BOOLEAN),
        serviceMonitor=_closed(enabled=BOOLEAN, interval=DURATION, labels=LABELS, tlsConfig=FREE, basicAuth=FREE),
        podMonitor=_closed(enabled=BOOLEAN, interval=DURATION, labels=LABELS, tlsConfig=FREE, basicAuth=FREE),
        prometheusRule=_closed(enabled=BOOLEAN, labels=LABELS),
        dashboards=_closed(enabled=BOOLEAN, labels=LABELS),
        networkPolicy=_closed(enabled=BOOLEAN, **{"from": FREE_LIST}),
    )
    # Helm adds it where the chart is a dependency of another.
    values["properties"]["global"] = FREE
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": definitions, **values}


def _closed(**properties: Any) -> dict[str, Any]:
    """An object that has these properties and no others."""
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _schema_hook(kind: type) -> dict[str, Any]:
    if kind is ByteRate:
        return {"oneOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": RATE}]}
    raise NotImplementedError(kind)


if __name__ == "__main__":
    sys.exit(main())
