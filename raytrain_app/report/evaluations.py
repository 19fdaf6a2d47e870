"""The evaluations that a run directory holds."""

from __future__ import annotations

import json
from typing import Any

from raytrain_app.errors import StorageError
from raytrain_app.storage.folder import Folder


def path_of(split: str) -> str:
    """Where in a run directory the evaluation of a split is."""
    return f"evaluations/{split}.json"


def read_evaluation(folder: Folder) -> dict[str, Any] | None:
    """The evaluation of a run's test rows, else of its validation rows, None where there is neither.

    Raises:
        StorageError: the file is damaged.
    """
    for split in ("test", "validation"):
        if folder.exists(path_of(split)):
            try:
                return dict(json.loads(folder.read_text(path_of(split))))
            except ValueError:
                raise StorageError(f"{folder.at(path_of(split))} is damaged; delete it and evaluate the run again") from None
    return None
