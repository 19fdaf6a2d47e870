"""A cluster file as Ray reads it, with the line of every key, and what was found wrong with it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from raytrain_app.errors import JobError

Keys = tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """Something about a cluster file that its user should know.

    Attributes:
        path: dotted path of the key, list items by number.
        text: what was found, what was expected, what to do.
        fatal: it will not work, or not as written; otherwise it is advice.
    """

    path: str
    text: str
    fatal: bool = True


@dataclass(frozen=True)
class ClusterFile:
    """A parsed cluster file.

    Attributes:
        source: what to call it in messages.
        data: its content, as Ray's own loader gives it.
        lines: for each path of keys the line (from 1) it stands on.
        findings: what reading it already showed: keys that are there twice.
    """

    source: str
    data: dict[str, Any]
    lines: Mapping[Keys, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def at(self, path: str) -> str:
        """The path with its line, or with that of what is nearest to it and in the file."""
        line = self.line(path)
        return f"{path} (line {line})" if line else path

    def line(self, path: str) -> int:
        """The line of the path, or of what is nearest to it and in the file; 0 if nothing is."""
        lines = {".".join(keys): line for keys, line in self.lines.items()}  # keys may have dots in them
        while path not in lines and "." in path:
            path = path.rpartition(".")[0]
        return lines.get(path, 0)

    @property
    def node_types(self) -> dict[str, dict[str, Any]]:
        """`available_node_types`, without what is not a section: the schema's findings tell of that."""
        types = section(self.data, "available_node_types")
        return {str(name): node for name, node in types.items() if isinstance(node, dict)}

    @property
    def head_type(self) -> str:
        """Name of the head's node type, empty if it is not given."""
        return str(self.data.get("head_node_type") or "")

    @property
    def max_workers(self) -> int:
        """The global limit; Ray's own default is 2."""
        return whole(self.data.get("max_workers"), 2)

    def commands(self, *names: str) -> str:
        """The text of the named lists of commands, one command a line."""
        lists = (self.data.get(name) for name in names)
        return "\n".join(str(command) for commands in lists if isinstance(commands, list) for command in commands)


def section(data: Any, *keys: str) -> dict[str, Any]:
    """The mapping at the path, empty where there is none."""
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}


def whole(value: Any, default: int) -> int:
    """The value if it is a whole number."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at the nearest known name, empty if none is near."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def shown(value: Any) -> str:
    """A value as it may stand in a file, cut where it is long."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def load_cluster(path: str) -> ClusterFile:
    """Reads a cluster file.

    Raises:
        JobError: it cannot be read, or is not YAML.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise JobError(f"cluster file {path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise JobError(f"cluster file {path}: byte {error.start} is not UTF-8; expected a YAML text file") from None
    return cluster_from_text(text, path)


def cluster_from_text(text: str, source: str) -> ClusterFile:
    """As `load_cluster`, for the text of a cluster file."""
    try:
        data = yaml.safe_load(text)
        node = yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise JobError(f"cluster file {source}, {where}{', '.join(filter(None, (error.context, error.problem)))}") from None
    except yaml.YAMLError as error:
        raise JobError(f"cluster file {source}: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict) or node is None:
        raise JobError(f"cluster file {source}: expected keys and values such as cluster_name: raytrain")
    lines: dict[Keys, int] = {}
    twice: list[Finding] = []
    _walk(node, (), lines, twice)
    return ClusterFile(source, data, lines, tuple(twice))


def _walk(node: yaml.Node, keys: Keys, lines: dict[Keys, int], twice: list[Finding]) -> None:
    """Notes the lines of all keys below `node`. What an alias or a merge brings stands where its anchor is."""
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            lines.setdefault((*keys, str(number)), item.start_mark.line + 1)
            _walk(item, (*keys, str(number)), lines, twice)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                for merged in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    _walk(merged, keys, lines, [])
                continue
            key = str(key_node.value)
            path = (*keys, key)
            if key in seen:
                twice.append(Finding(".".join(path), "is here twice, and only the last one counts; keep one of them"))
            seen.add(key)
            lines[path] = key_node.start_mark.line + 1
            _walk(value_node, path, lines, twice)
