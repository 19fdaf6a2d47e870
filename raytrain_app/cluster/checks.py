"""`raytrain cluster check`: everything that is wrong with a cluster file, at once."""

from __future__ import annotations

from raytrain_app.cluster.document import ClusterFile, Finding
from raytrain_app.cluster.rules.commands import command_rules
from raytrain_app.cluster.rules.machines import machine_rules
from raytrain_app.cluster.rules.structure import structure


def check_cluster(file: ClusterFile) -> list[Finding]:
    """All findings, each once, in the order of the file's lines; what a rule says of a missing key comes first."""
    findings = dict.fromkeys((*file.findings, *structure(file), *machine_rules(file), *command_rules(file)))
    return sorted(findings, key=lambda finding: (_line(file, finding), finding.path))


def _line(file: ClusterFile, finding: Finding) -> int:
    keys = tuple(finding.path.split("."))
    return next((file.lines[keys[:length]] for length in range(len(keys), 0, -1) if keys[:length] in file.lines), 0)
