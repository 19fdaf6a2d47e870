"""The run directory: everything about a run in plain files, readable without Ray. The driver is its only writer.

See the table of files in the README. Checkpoints inside are written by the leading worker (`CheckpointStore`).
"""

from __future__ import annotations

import difflib
import itertools
import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from raytrain_app.errors import DataError, JobError, StorageError
from raytrain_app.job import Job, job_from_text, result_differences
from raytrain_app.storage import records
from raytrain_app.storage.folder import Folder
from raytrain_app.storage.records import Record
from raytrain_app.storage.spool import Spool

JOB, DATA, METRICS, EVENTS, RESULT = "job.yaml", "data.sha256", "metrics.jsonl", "events.jsonl", "result.json"
STATUS, LEDGER = "status.json", "ledger"


class RunDirectory:
    """One run's directory. Make it with `reserve`, `reopen` or `open`; the first two allow `writing`."""

    def __init__(self, folder: Folder, job: Job | None = None, *, resumed: bool = False) -> None:
        self.folder, self._job, self._resumed = folder, job, resumed
        self._spool: Spool | None = None

    @classmethod
    def reserve(cls, job: Job) -> RunDirectory:
        """For a new run: checks that its name is free and its storage can be written. Nothing is created before `writing`.

        Raises:
            StorageError: there is a run of that name, or the storage cannot be written.
        """
        folder = Folder.open(job.storage).child(job.name)
        if folder.exists():
            raise _taken(folder)
        folder.check_writable()
        return cls(folder, job)

    @staticmethod
    def begun(job: Job) -> bool:
        """Whether there is a run of the job's name, so that it can be gone on with."""
        return Folder.open(job.storage).child(job.name).exists("job.yaml")

    @classmethod
    def reopen(cls, job: Job) -> RunDirectory:
        """For going on with a run where it stopped.

        Raises:
            StorageError: there is no such run, or its storage cannot be written.
            JobError: the run was started with a job that differs in something that changes the result.
        """
        directory = cls(Folder.open(job.storage).child(job.name), job, resumed=True)
        differences = result_differences(directory.read_job(), job)
        if differences:
            raise JobError(
                f"run {job.name} cannot be resumed with a job that gives another result: {'; '.join(differences)}. "
                "Take the changes back, or start a new run under another --name"
            )
        directory.folder.check_writable()
        return directory

    @classmethod
    def open(cls, uri: str) -> RunDirectory:
        """For reading.

        Raises:
            StorageError: there is no run at `uri`.
        """
        directory = cls(Folder.open(uri))
        directory._require_run()
        return directory

    @property
    def uri(self) -> str:
        """Absolute path or URI."""
        return self.folder.uri

    @property
    def checkpoints(self) -> Folder:
        """For `CheckpointStore`."""
        return self.folder.child("checkpoints")

    @property
    def ledger(self) -> Folder:
        """For the samples applied, with `audit: true`."""
        return self.folder.child(LEDGER)

    @contextmanager
    def writing(self, fingerprint: str) -> Iterator[None]:
        """Creates the directory, or takes it up again, and lets the block write; at the end all is on storage.

        Args:
            fingerprint: hash of the data set; a run is not resumed on other data.

        Raises:
            StorageError: the name was taken in the meantime, or the storage cannot be written.
            DataError: the data is not what the run was started with.
        """
        assert self._job is not None, "a directory that was opened for reading"
        if self._resumed:
            self._refuse_other_data(fingerprint)
            self.folder.write(JOB, self._job.to_yaml().encode())
            self.folder.delete(RESULT)
        elif not self.folder.create(JOB, self._job.to_yaml().encode()):
            raise _taken(self.folder)
        self.folder.write(DATA, f"{fingerprint}\n".encode())
        self._spool = Spool(self.folder)
        try:
            yield
        finally:
            self._spool.close()
            self._spool = None

    def grow(self, name: str) -> Any:
        """The local path at which the driver may append to a file of the directory, inside `writing`."""
        assert self._spool is not None, "outside of `writing`"
        return self._spool.path(name)

    def append_metrics(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Adds records to metrics.jsonl."""
        records.append(self.grow(METRICS), lines)

    def append_ledger(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Adds records {"epoch", "step", "ids"} to the ledger, one file an epoch."""
        for epoch, those in itertools.groupby(lines, lambda line: line["epoch"]):
            records.append(self.grow(f"{LEDGER}/epoch-{epoch:05d}.jsonl"), those)

    def retain_steps(self, clock: int, step: int, clock_of: Callable[[Record], int | None]) -> None:
        """Forgets what a run that is resumed will do again and in another way.

        Args:
            clock: of the state that it goes on from; later lines of metrics.jsonl go.
            step: steps of that state; later ones go from the ledger.
            clock_of: the clock of a line, None for lines that stay.
        """
        self._retain(METRICS, lambda record: (clock_of(record) or 0) <= clock)
        for name in self.ledger.list():
            if name.endswith(".jsonl"):
                self._retain(f"{LEDGER}/{name}", lambda record: record["step"] <= step)

    def append_events(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Adds records to events.jsonl."""
        records.append(self.grow(EVENTS), lines)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Writes result.json, whole or not at all."""
        self.folder.write(RESULT, records.to_json(result, indent=2).encode())

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Writes status.json, whole or not at all."""
        self.folder.write(STATUS, records.to_json(status).encode())

    def read_status(self) -> Record | None:
        """The newest status that the driver wrote, None before the first."""
        return dict(json.loads(self.folder.read_text(STATUS))) if self.folder.exists(STATUS) else None

    def read_job(self) -> Job:
        """The job that the run was started with.

        Raises:
            StorageError: there is no run here.
            JobError: its job cannot be read by this version.
        """
        self._require_run()
        return job_from_text(self.folder.read_text(JOB), self.folder.at(JOB))

    def read_metrics(self) -> list[Record]:
        """The records of metrics.jsonl, those not yet uploaded included."""
        return self._read(METRICS)

    def read_events(self) -> list[Record]:
        """The records of events.jsonl, those not yet uploaded included."""
        return self._read(EVENTS)

    def read_result(self) -> Record | None:
        """The content of result.json, None while the run has not ended."""
        if not self.folder.exists(RESULT):
            return None
        try:
            return dict(json.loads(self.folder.read_text(RESULT)))
        except ValueError:
            raise StorageError(f"{self.folder.at(RESULT)} is damaged: it is not a JSON object") from None

    def best_checkpoint(self) -> str | None:
        """URI of the best checkpoint, of the latest where none is the best, None where there is none."""
        for pointer in ("best", "latest"):
            if self.checkpoints.exists(pointer):
                return self.checkpoints.child(self.checkpoints.read_text(pointer).strip()).uri
        return None

    def _read(self, name: str) -> list[Record]:
        if self._spool is not None:
            path = self.grow(name)
            return records.parse(path.read_bytes() if path.exists() else b"", str(path))
        return records.parse(self.folder.read(name), self.folder.at(name)) if self.folder.exists(name) else []

    def _retain(self, name: str, keeps: Callable[[Record], bool]) -> None:
        path, found = self.grow(name), self._read(name)
        kept = [record for record in found if keeps(record)]
        if len(kept) < len(found):
            replacement = path.with_suffix(".new")
            records.append(replacement, kept)
            replacement.replace(path)

    def _require_run(self) -> None:
        if self.folder.exists(JOB):
            return
        near: list[str] = []
        if self.folder.local_path is not None:
            above = Folder.open(str(self.folder.local_path.parent))
            near = difflib.get_close_matches(self.folder.local_path.name, above.list(), 1)
        hint = f"; did you mean {near[0]}?" if near else "; check its name and `storage`"
        raise StorageError(f"there is no run in {self.folder.at('')} (no {JOB}){hint}")

    def read_data_sha256(self) -> str | None:
        """Hash of the data set that the run was started with, None before its data was read."""
        return self.folder.read_text(DATA).strip() if self.folder.exists(DATA) else None

    def _refuse_other_data(self, fingerprint: str) -> None:
        started_with = self.read_data_sha256()
        if started_with is not None and started_with != fingerprint:
            raise DataError(
                f"run {self.folder.at('')} was started with other data (sha256 {started_with[:12]}..., "
                f"now {fingerprint[:12]}...); restore the data, or start a new run under another --name"
            )


def require_shared(uri: str) -> None:
    """Checks on a worker's node that the run directory which the driver made is really the same one here, and writable.

    Raises:
        StorageError: it is not, as with a folder on the driver's own disk and a worker on another machine.
    """
    folder = Folder.open(uri)
    if not folder.exists(JOB):
        raise StorageError(
            f"host {socket.gethostname()} does not see the run directory {folder.at('')}; `storage` must be reachable by every "
            "node: use a network folder, gs://bucket/path or s3://bucket/path"
        )
    folder.check_writable()


def _taken(folder: Folder) -> StorageError:
    return StorageError(f"{folder.at('')} exists already; go on with that run by --resume, or give this one another --name")
