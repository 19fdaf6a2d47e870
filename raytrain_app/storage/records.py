"""Records as JSON, one on each line: appended whole, read back even when the last writer was killed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from raytrain_app.errors import StorageError
from raytrain_app.storage.folder import explained

Record = dict[str, Any]


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: NaN and infinities, which JSON does not have, become null."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)


def append(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Adds records to a file on this machine, all in one write; a line that a killed writer left unfinished is cut off.

    Raises:
        StorageError: the file cannot be written.
    """
    data = "".join(f"{to_json(record)}\n" for record in records).encode()
    with explained("write", str(path)), path.open("a+b", buffering=0) as file:
        _cut_unfinished_line(file)
        file.write(data)


def parse(data: bytes, where: str) -> list[Record]:
    """Reads records; an unfinished last line is left out.

    Raises:
        StorageError: another line is not a JSON object.
    """
    records = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise StorageError(f"{where} is damaged: line {number} is not a JSON object; restore the file or delete the line")
        records.append(record)
    return records


def _cut_unfinished_line(file: Any) -> None:
    end = file.seek(0, 2)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):  # a NumPy or torch scalar
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
