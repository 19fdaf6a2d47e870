"""YAML as people expect it: the core schema of YAML 1.2, without duplicate keys, aliases and tags.

PyYAML follows YAML 1.1, where `no` is false, `1e-3` is text, `010` is eight and `12:30` is 750. Its scanner, parser and
emitter are used here with the scalar rules of https://yaml.org/spec/1.2.2/#103-core-schema instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

Keys = tuple[str, ...]


class YamlError(Exception):
    """A text that is not YAML, or uses what is refused; the message starts with line and column."""


@dataclass(frozen=True)
class Document:
    """A parsed text: its value, and for each path of keys the line (from 1) it stands on."""

    value: Any
    lines: dict[Keys, int]


class _CoreSchema(yaml.resolver.BaseResolver):
    """Which plain scalars are null, true, false or a number; all others are text."""


for _type, _first, _pattern in (
    ("null", ["~", "n", "N", ""], r"~|null|Null|NULL|"),
    ("bool", list("tTfF"), r"true|True|TRUE|false|False|FALSE"),
    ("int", list("-+0123456789"), r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    ("float", list("-+.0123456789"), r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"),
    ("float", list("-+."), r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
):
    _CoreSchema.add_implicit_resolver(f"tag:yaml.org,2002:{_type}", re.compile(f"({_pattern})\\Z"), _first)


class _Loader(yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser, yaml.composer.Composer, _CoreSchema):
    def __init__(self, stream: str) -> None:
        yaml.reader.Reader.__init__(self, stream)
        yaml.scanner.Scanner.__init__(self)
        yaml.parser.Parser.__init__(self)
        yaml.composer.Composer.__init__(self)
        _CoreSchema.__init__(self)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # aliases allow loops and texts that grow without bound
            raise _refused(
                self.peek_event(),  # type: ignore[no-untyped-call]
                "aliases (*name) are not supported; write the value out",
            )
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would read as something else."""

    yaml_implicit_resolvers = {
        first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *_CoreSchema.yaml_implicit_resolvers.get(first, [])]
        for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_CoreSchema.yaml_implicit_resolvers}
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = None if data.isprintable() else '"'  # PyYAML's other styles lose some line breaks
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_Dumper.add_representer(str, _Dumper.represent_str)


def parse(text: str) -> Document:
    """Reads one YAML document of mappings, lists and scalars; keys are always text.

    Raises:
        YamlError: the text is malformed, or has a duplicate key, an alias, a tag or a number beyond reason.
    """
    lines: dict[Keys, int] = {}
    try:
        node = yaml.compose(text, Loader=_Loader)  # type: ignore[arg-type]
        return Document(None if node is None else _value(node, (), lines), lines)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"line {line}: character {error.character!r} is not allowed in YAML") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        raise YamlError(f"{where}: {', '.join(filter(None, (error.context, error.problem)))}") from None
    except RecursionError:
        raise YamlError("line 1, column 1: sections are nested too deeply") from None


def dump(value: Any) -> str:
    """The text of plain data, in the order given; `parse` reads it back to equal data."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _value(node: yaml.Node, keys: Keys, lines: dict[Keys, int]) -> Any:
    lines.setdefault(keys, node.start_mark.line + 1)
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    if kind not in ("map", "seq", "str", "null", "bool", "int", "float"):
        raise _refused(node, f"tag {node.tag} is not supported; leave it out")
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refused(key_node, "expected a key, found a list or a mapping")
            key = str(key_node.value)
            if key in mapping:
                raise _refused(key_node, f"key {key!r} is here for the second time; keep one of them")
            lines[(*keys, key)] = key_node.start_mark.line + 1
            mapping[key] = _value(value_node, (*keys, key), lines)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*keys, str(index)), lines) for index, item in enumerate(node.value)]
    return _scalar(node, kind)


def _scalar(node: yaml.Node, kind: str) -> Any:
    text = str(node.value)
    try:
        if kind == "null":
            return None
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        if kind == "int":
            return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
        if kind == "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    except (KeyError, ValueError):  # an explicit tag on other text, or more digits than Python converts
        raise _refused(node, f"{text[:20]!r} cannot be used as {kind}") from None
    return text


def _refused(at: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)
