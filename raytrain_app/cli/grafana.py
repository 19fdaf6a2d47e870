"""`raytrain grafana`: the dashboard that goes with the metrics at Ray's Prometheus endpoints."""

from __future__ import annotations

from importlib import resources

import typer


def grafana() -> None:
    """Print a Grafana dashboard for the metrics of runs, to be imported there as JSON.

    Example: [bold]raytrain grafana > raytrain.json[/bold]
    """
    typer.echo((resources.files("raytrain_app.report") / "grafana.json").read_text(encoding="utf-8").rstrip("\n"))
