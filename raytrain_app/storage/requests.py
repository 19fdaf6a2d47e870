"""What other processes ask of a running run: small files in its directory, which the driver takes up between two looks.

Whoever can reach the storage can reach the run, with no connection to Ray: from another terminal, a submitted job, or a
laptop whose cluster keeps its runs on an object store.
"""

from __future__ import annotations

import difflib
import json
import time
import uuid
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from raytrain_app.errors import StorageError
from raytrain_app.storage.folder import Folder
from raytrain_app.storage.rundir import RunDirectory

FOLDER = "requests"
REMOTE_POLL_S = 5.0


class Request(TypedDict, total=False):
    """A request: `kind`, for "scale" the limits, and for "servers" their number."""

    kind: Literal["stop", "checkpoint", "scale", "servers"]
    least: int
    most: int
    servers: int


class Requests:
    """The requests to one run.

    Args:
        folder: the run's directory.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder.child(FOLDER)
        self._every_s = 0.0 if folder.local_path is not None else REMOTE_POLL_S
        self._looked_s = float("-inf")

    def post(self, request: Request) -> str:
        """Leaves a request; returns its name, which `waits` takes."""
        name = f"{time.time_ns()}-{uuid.uuid4().hex[:8]}.json"
        self._folder.write(name, json.dumps(request).encode())
        return name

    def waits(self, name: str) -> bool:
        """Whether a request has not been taken up yet."""
        return self._folder.exists(name)

    def withdraw(self, name: str) -> None:
        """Takes a request back that nobody has taken up."""
        self._folder.delete(name)

    def take(self) -> list[Request]:
        """All requests since the last call, oldest first; on an object store it looks every few seconds only."""
        now_s = time.monotonic()
        if now_s - self._looked_s < self._every_s:
            return []
        self._looked_s = now_s
        requests = []
        for name in self._folder.list():
            request = _parse(self._folder.read(name))
            self._folder.delete(name)
            if request is not None:
                requests.append(request)
        return requests


def _parse(data: bytes) -> Request | None:
    """A request, or None for what is not one: the file may be anybody's."""
    try:
        found: Any = json.loads(data)
    except ValueError:
        return None
    if not isinstance(found, Mapping) or found.get("kind") not in ("stop", "checkpoint", "scale", "servers"):
        return None
    if found["kind"] == "scale":
        least, most = found.get("least"), found.get("most")
        if not (isinstance(least, int) and isinstance(most, int) and 1 <= least <= most):
            return None
        return Request(kind="scale", least=least, most=most)
    if found["kind"] == "servers":
        servers = found.get("servers")
        return Request(kind="servers", servers=servers) if isinstance(servers, int) and servers >= 1 else None
    return Request(kind=found["kind"])


def find_run(reference: str | None, storage: str = "runs") -> Folder:
    """The directory of a run that is named by its directory, or by its name below `storage`; None is the newest there.

    Raises:
        StorageError: there is no such run.
    """
    if reference is None:
        return _newest_run(storage)
    candidates = [Folder.open(reference)] if "/" in reference else [Folder.open(storage).child(reference), Folder.open(reference)]
    for folder in candidates:
        if folder.exists("job.yaml"):
            return folder
    places = " nor ".join(folder.at("") for folder in candidates)
    near = difflib.get_close_matches(reference, Folder.open(storage).list(), n=1)
    advice = f"did you mean {near[0]}?" if near else "give its directory, or its name with --storage; `raytrain list` shows names"
    raise StorageError(f"there is no run at {places}; {advice}")


def _newest_run(storage: str) -> Folder:
    """The run whose driver was the last to tell how it is."""
    folder = Folder.open(storage)
    runs = [folder.child(name) for name in folder.list()]
    runs = [run for run in runs if run.exists("job.yaml")]
    if not runs:
        raise StorageError(f"there are no runs in {folder.at('')}; name a run, or the storage of your jobs with --storage")
    return max(runs, key=lambda run: (RunDirectory(run).read_status() or {"time": 0.0})["time"])
