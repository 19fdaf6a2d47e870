"""`raytrain cluster check`: everything that is wrong with a cluster file, at once."""

from __future__ import annotations

from dataclasses import replace

from raytrain_app.cluster.document import ClusterFile, Finding
from raytrain_app.cluster.rules.commands import command_rules
from raytrain_app.cluster.rules.fields import field_rules
from raytrain_app.cluster.rules.machines import machine_rules
from raytrain_app.cluster.rules.structure import structure


def check_cluster(file: ClusterFile) -> list[Finding]:
    """All findings, each once, in the order of the file's lines; what a rule says of a missing key comes first."""
    rules = (*file.findings, *structure(file), *field_rules(file), *machine_rules(file), *command_rules(file))
    found = sorted(dict.fromkeys(rules), key=lambda finding: file.line(finding.path))
    # What stands in one place and is used in several, as anchors allow, is said once.
    same: dict[tuple[int | str, str], list[Finding]] = {}
    for finding in found:
        same.setdefault((file.line(finding.path) or finding.path, finding.text), []).append(finding)
    return [_once(findings) for findings in same.values()]


def _once(findings: list[Finding]) -> Finding:
    first, *others = findings
    names = [parts[1] for finding in others if len(parts := finding.path.split(".")) > 1]
    return replace(first, text=f"{first.text} (also: {', '.join(dict.fromkeys(names))})") if names else first
