"""Run as a program: renders a chart with Helm's own engine, once per set of values.

In a process of its own, because the engine brings the Go runtime with its threads and signal handlers.
Reads from standard input {"chart": path, "releases": [{"name", "namespace", "values"}, ...]} and writes
{"metadata": ..., "lint": [message, ...], "releases": [{"files": {template: text}} or {"error": text}, ...]}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import helm_python


def render(chart: helm_python.Chart, release: dict[str, Any]) -> dict[str, Any]:
    try:
        files = chart.render(
            release["values"], name=release["name"], namespace=release["namespace"]
        )
    except helm_python.HelmError as error:
        return {"error": str(error)}
    return {"files": files}


def main() -> None:
    asked = json.load(sys.stdin)
    with helm_python.Chart.load(asked["chart"]) as chart:
        releases = [render(chart, release) for release in asked["releases"]]
        metadata = chart.metadata
    lint = helm_python.lint(asked["chart"], asked["releases"][0]["values"], strict=True)
    answer = {
        "metadata": metadata,
        "lint": [message for message in lint["messages"] if message["severity"] > 1],
        "releases": releases,
    }
    json.dump(answer, sys.stdout)


main()
