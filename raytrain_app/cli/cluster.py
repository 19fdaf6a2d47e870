"""`raytrain cluster`: commands about cluster files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from raytrain_app.errors import JobError

if TYPE_CHECKING:
    from raytrain_app.cluster.document import ClusterFile

app = typer.Typer(name="cluster", help="Check a cluster file.", no_args_is_help=True, rich_markup_mode="rich")

ROLES = "roles/compute.admin, roles/iam.serviceAccountUser, roles/iam.roleViewer and roles/storage.objectAdmin"


@app.callback()
def _group() -> None:
    """Keeps `check` a command of its own while it is the only one."""


@app.command()
def check(
    cluster_file: Annotated[str, typer.Argument(metavar="CLUSTER", help="The cluster file.", show_default=False)],
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Check a cluster file: all that is wrong with it, and all that Ray would accept but not do.

    Example: [bold]raytrain cluster check cluster.yaml[/bold]
    """
    from raytrain_app.cluster.checks import check_cluster
    from raytrain_app.cluster.document import load_cluster

    file = load_cluster(cluster_file)
    findings = check_cluster(file)
    for finding in findings:
        if not finding.fatal:
            typer.echo(f"advice: {file.at(finding.path)}: {finding.text}")
    problems = [f"{file.at(finding.path)}: {finding.text}" for finding in findings if finding.fatal]
    if problems:
        raise JobError("\n  ".join([f"{cluster_file}: {len(problems)} problem{'s' if len(problems) > 1 else ''}", *problems]))
    for line in _table(file):
        typer.echo(line)
    if file.data["provider"]["type"] == "gcp":
        typer.echo(
            f"The first `ray up` gives the head's service account {ROLES}; whoever runs it needs the right to do so. "
            "After a change of roles use `ray up --no-config-cache`."
        )


def _table(file: ClusterFile) -> list[str]:
    """The node types with what they have and cost, one a line."""
    from raytrain_app.cluster.catalog import prices_note, spot_range
    from raytrain_app.cluster.document import section, whole
    from raytrain_app.cluster.rules.machines import hourly_price, is_spot

    rows = [("node type", "machine", "resources", "nodes", "$ an hour")]
    for name, node in file.node_types.items():
        config, head = section(node, "node_config"), name == file.head_type
        price = hourly_price(config)
        shown = "not known" if price is None else f"{price:.2f}"
        if price is not None and is_spot(config):
            shown += " on demand, {:.2f} to {:.2f} spot".format(*spot_range(price))
        rows.append(
            (
                name,
                str(config.get("machineType", config.get("acceleratorType", "-"))),
                ", ".join(f"{amount} {resource}" for resource, amount in section(node, "resources").items()),
                "1" if head else f"{whole(node.get('min_workers'), 0)}..{whole(node.get('max_workers'), file.max_workers)}",
                shown,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows]
    return [*lines, f"At most {file.max_workers} workers in all. {prices_note()}."]
