"""What is sent to a cluster with a job: the current folder less what its ignore files name, and what the job needs anyway."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from pathspec import GitIgnoreSpec

from raytrain_app.data.sources import NAMES
from raytrain_app.errors import JobError
from raytrain_app.job import Job

JOB_FILE = "raytrain-job.yaml"
"""The resolved job in the package."""
LIMIT_BYTES = 100 * 2**20
"""Ray's package limit is larger, but its dashboard takes no larger request."""
IGNORE_FILES = (".gitignore", ".rayignore")
LEFT_OUT = {".git", ".hg", ".venv", "venv", "__pycache__", "node_modules", ".ipynb_checkpoints"}
LEFT_OUT |= {".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".tox", ".DS_Store"}


@dataclass(frozen=True)
class Package:
    """The content of a package.

    Attributes:
        folder: what the paths are relative to.
        files: all files, sorted.
        forced: those that an ignore file names although the job needs them, with that file.
        notes: sentences on what is needed and not sent.
    """

    folder: Path
    files: tuple[Path, ...]
    forced: dict[Path, str]
    notes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size before compression."""
        return sum((self.folder / path).stat().st_size for path in self.files)


def plan_package(job: Job, folder: Path) -> Package:
    """Chooses the files for a job that was loaded, with its task, in `folder`.

    Raises:
        JobError: something that the job needs cannot be sent, or all of it is too large; nothing was sent.
    """
    folder = folder.resolve()
    problems, notes = _unreachable(job, folder)
    if problems:
        raise JobError("\n".join(problems))
    needed = {*_imported(folder), *_data_files(job, folder)}
    ignores = _Ignores(folder)
    chosen = set(_walk(folder, ignores, _run_folder(job, folder)))
    forced = {path: ignores.reason(path) for path in sorted(needed - chosen)}
    package = Package(folder, tuple(sorted(chosen | needed)), forced, tuple(notes))
    if package.num_bytes > LIMIT_BYTES:
        raise JobError(_too_large(package))
    return package


def write_package(package: Package, job: Job, target: Path) -> None:
    """Writes the package, with the resolved job in it, as a zip file."""
    with ZipFile(target, "w", ZIP_DEFLATED, strict_timestamps=False) as archive:
        archive.writestr(JOB_FILE, job.to_yaml())
        for path in package.files:
            archive.write(package.folder / path, path.as_posix())


class _Ignores:
    """The ignore files of a folder and those below it, read when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._specs: dict[Path, list[tuple[str, GitIgnoreSpec]]] = {}

    def reason(self, path: Path, *, is_folder: bool = False) -> str:
        """The ignore file that names the path, relative to the folder; empty if none does."""
        for parent in (path.parents[i] for i in reversed(range(len(path.parents)))):
            below = path.relative_to(parent).as_posix() + ("/" if is_folder else "")
            for name, spec in self._of(parent):
                if spec.match_file(below):
                    return (parent / name).as_posix()
        return next((part for part in path.parts if part in LEFT_OUT), "")

    def _of(self, parent: Path) -> list[tuple[str, GitIgnoreSpec]]:
        if parent not in self._specs:
            files = [(name, self._folder / parent / name) for name in IGNORE_FILES]
            self._specs[parent] = [
                (name, GitIgnoreSpec.from_lines(file.read_text(encoding="utf-8", errors="replace").splitlines()))
                for name, file in files
                if file.is_file()
            ]
        return self._specs[parent]


def _walk(folder: Path, ignores: _Ignores, run_folder: Path | None) -> Iterator[Path]:
    """All files that nothing leaves out, relative to the folder. Links to folders are not followed."""
    for root, names, files in os.walk(folder):
        here = Path(root).relative_to(folder)
        names[:] = [
            name
            for name in names
            if name not in LEFT_OUT
            and folder / here / name != run_folder
            and not (folder / here / name / "pyvenv.cfg").exists()
            and not ignores.reason(here / name, is_folder=True)
        ]
        for name in files:
            if name not in LEFT_OUT and (folder / here / name).is_file() and not ignores.reason(here / name):
                yield here / name


def _imported(folder: Path) -> Iterator[Path]:
    """Modules of the folder that the task imported, and so will import there; installed packages are installed there too."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is not None and module.__name__ != "__main__":
            path = Path(file).resolve()
            if path.is_file() and path.is_relative_to(folder) and not path.is_relative_to(Path(sys.prefix).resolve()):
                yield path.relative_to(folder)


def _data_files(job: Job, folder: Path) -> Iterator[Path]:
    for _, path in _local_data(job, folder):
        if path.is_relative_to(folder):
            files = path.rglob("*") if path.is_dir() else [path] if path.exists() else folder.glob(str(path.relative_to(folder)))
            yield from (file.relative_to(folder) for file in files if file.is_file())


def _unreachable(job: Job, folder: Path) -> tuple[list[str], list[str]]:
    """What the cluster will not see: problems, and notes where it may see it after all."""
    problems, notes = [], []
    if "://" not in job.storage and not os.path.isabs(job.storage):
        problems.append(
            f"storage: found {job.storage}, which on the cluster is a folder that is deleted with the job; "
            "expected a bucket, as by --set storage=gs://my-bucket/runs, or the absolute path of a folder that all nodes share"
        )
    for key, path in _local_data(job, folder):
        if path.is_relative_to(folder):
            continue
        if not os.path.isabs(str(getattr(job.data, key.rpartition(".")[2]))):
            problems.append(f"{key}: {path} is outside of the current folder, and only that is sent; move it, or use a bucket")
        else:
            notes.append(f"{key}: {path} is not sent, since it is outside of the current folder; it must be there on all nodes")
    return problems, notes


def _local_data(job: Job, folder: Path) -> Iterator[tuple[str, Path]]:
    """The job's keys that name files, with the normalized path; names of data sets and URIs are none."""
    for key, source in (("data.source", job.data.source), ("data.test_source", job.data.test_source)):
        if source is not None and source not in NAMES and ("://" not in source or source.startswith("file://")):
            yield key, Path(os.path.normpath(folder / os.path.expanduser(source.removeprefix("file://"))))


def _run_folder(job: Job, folder: Path) -> Path | None:
    """Where earlier runs of this machine are, if inside the folder; nobody needs them there."""
    for name in (job.storage, "runs"):
        if "://" not in name and (folder / name).is_dir():
            return folder / name
    return None


def _too_large(package: Package) -> str:
    sizes: Counter[str] = Counter()
    for path in package.files:
        sizes[path.parts[0]] += (package.folder / path).stat().st_size
    largest = ", ".join(f"{name} ({_mib(size)})" for name, size in sizes.most_common(3))
    return (
        f"{package.folder} is too large to be sent: {_mib(package.num_bytes)} in {len(package.files)} files, and a cluster takes "
        f"at most {_mib(LIMIT_BYTES)}. The largest: {largest}. Put data into a bucket (data.source: gs://...), and name what is "
        "not needed in .rayignore"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes < 10 * 2**20 else f"{num_bytes / 2**20:.0f} MiB"


def describe(package: Package) -> Sequence[str]:
    """What its sender should know, as sentences."""
    forced = [
        f"{path} is sent although {source} leaves it out, since the job needs it" for path, source in package.forced.items()
    ]
    shown = forced if len(forced) <= 5 else [*forced[:4], f"and so are {len(forced) - 4} more files"]
    return [f"sending {len(package.files)} files, {_mib(package.num_bytes)}", *shown, *package.notes]
