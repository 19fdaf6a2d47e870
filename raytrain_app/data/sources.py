"""From `data.source` to the parts to read: well-known names, paths, globs, URIs; which format, which split."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections import defaultdict
from pathlib import Path

from raytrain_app.data.fetch import cache_folder, fetch_set, fetch_url, is_complete
from raytrain_app.data.files import File, find_files, shown
from raytrain_app.data.formats import FORMATS, images
from raytrain_app.data.known import KNOWN, existing_folders
from raytrain_app.data.parts import SPLITS, Plan, Want
from raytrain_app.errors import DataError

SAMPLE = "mnist-sample"
NAMES = (SAMPLE, *KNOWN)


def plan_source(
    source: str, format_name: str, want: Want, *, offline: bool = False, download: bool = True, as_test: bool = False
) -> Plan:
    """What reading `source` means, after checking all that names and headers tell.

    Args:
        source: the job's `data.source`.
        format_name: "auto" or the name of a format.
        want: what the task expects.
        offline: never use the network.
        download: False plans nothing for what would have to be downloaded first.
        as_test: all that is wanted are test rows; a source that does not speak of splits has nothing else.
    """
    plan = Plan()
    if source in KNOWN:
        want = dataclasses.replace(want, title=KNOWN[source].title)
    try:
        files = _find(source, offline, download, plan)
        if files is not None:
            found = _plan_files(files, source, format_name, want)
            plan = Plan(found.parts, found.problems, plan.notes + found.notes)
    except DataError as error:
        plan.problems.append(str(error))
        return plan
    plan.parts.sort(key=lambda part: SPLITS.index(part.split))
    if as_test:
        tests = [part for part in plan.parts if part.split == "test"]
        plan.parts = tests or [dataclasses.replace(part, split="test") for part in plan.parts]
    elif files is not None and not plan.problems and not any(part.split == "train" for part in plan.parts):
        others = " and ".join(dict.fromkeys(part.split for part in plan.parts))
        plan.problems.append(
            f"data.source: {shown(source)} has no rows for training" + (f", only for {others}" if others else "")
        )
    return plan


def locate_known(name: str, offline: bool, download: bool = True) -> tuple[str | None, str]:
    """The folder (or file) that has a well-known data set, and a note on where it was found; downloads it if it must.

    Raises:
        DataError: it is nowhere on this machine and cannot be downloaded.
    """
    folder = cache_folder() / name
    if all(is_complete(folder, file) for file in KNOWN[name].files):
        return str(folder), ""
    for other in existing_folders(name):
        return other, f"{KNOWN[name].title} is read from {other}"
    if offline:
        raise DataError(
            f"data.source: {KNOWN[name].title} is not on this machine (looked in {folder}, {', '.join(KNOWN[name].folders)}), "
            f"and data.offline: true forbids to download it; run `raytrain data fetch {name}` where there is a network"
        )
    if not download:
        return None, ""
    fetch_set(name, folder)
    return str(folder), f"{KNOWN[name].title} was downloaded to {folder}"


def _find(source: str, offline: bool, download: bool, plan: Plan) -> list[File] | None:
    if source == SAMPLE:
        return find_files(str(Path(__file__).parent / "embedded" / "mnist-10k.parquet"))
    if source in KNOWN:
        folder, note = locate_known(source, offline, download)
        plan.notes += [note] if note else []
        return find_files(folder) if folder else None
    names = source.split(",")
    if any(name.strip().startswith(("http://", "https://")) for name in names):
        if not download and not offline:
            return None
        files = []
        for name in names:
            files += find_files(str(fetch_url(name.strip(), offline)) if "://" in name else name)
        return files
    try:
        return find_files(source)
    except DataError as error:
        near = difflib.get_close_matches(source.lower().replace("_", "-"), NAMES, 1)
        raise DataError(f"{error}, or one of {', '.join(NAMES)}" + (f"; did you mean {near[0]}?" if near else "")) from None


def _plan_files(files: list[File], source: str, format_name: str, want: Want) -> Plan:
    by_format: dict[str, list[File]] = defaultdict(list)
    for file in files:
        # A folder may hold a great many images: their names are enough.
        head = b"" if images.recognises(file, b"") else file.head(512)
        name = next((name for name, format_ in FORMATS.items() if format_.recognises(file, head)), None)
        if name:
            by_format[name].append(file)
    if format_name != "auto":
        return FORMATS[format_name].plan(by_format[format_name] or files, want)
    if len(by_format) > 1:
        counts = ", ".join(f"{name} ({len(members)})" for name, members in sorted(by_format.items()))
        raise DataError(
            f"data.source: {shown(source)} has files of several formats: {counts}; set data.format to one of them, or name files"
        )
    if not by_format:
        raise DataError(files[0].nonsense() or _unreadable(files, source))
    ((name, members),) = by_format.items()
    return FORMATS[name].plan(members, want)


def _unreadable(files: list[File], source: str) -> str:
    subject = "it is not" if len(files) == 1 else f"none of its {len(files)} files is"
    return (
        f"data.source: {shown(source)}: {subject} of a format that can be read ({', '.join(FORMATS)}); found the first bytes "
        f"{files[0].head(8).hex(' ')} in {os.path.basename(files[0].name)}"
    )
