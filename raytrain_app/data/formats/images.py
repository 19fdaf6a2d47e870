"""Folders of images: one folder a class, in a folder a split if there are several (train/3/a.png, or 3/a.png)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np

from raytrain_app.data.decode import BadImageError, decode
from raytrain_app.data.files import File, damage
from raytrain_app.data.parts import Batch, Part, Place, Plan, Want, split_of

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_MAX_FILES = 4096


def recognises(file: File, head: bytes) -> bool:
    return file.inside.lower().endswith(_SUFFIXES)


def plan(files: Sequence[File], want: Want) -> Plan:
    plan = Plan()
    by_split: dict[str, list[tuple[File, str]]] = {"train": [], "validation": [], "test": []}
    for file in files:
        above, class_name = os.path.split(os.path.dirname(file.inside))
        if not class_name:
            plan.problems.append(f"{file.name} is in no class folder; expected folders such as 3/image.png or train/3/image.png")
        else:
            by_split[split_of(above) or "train"].append((file, class_name))
    names = sorted({name for members in by_split.values() for _, name in members})
    numbers = all(name.isdecimal() for name in names)
    labels = {name: int(name) if numbers else place + want.label_offset for place, name in enumerate(names)}
    if not numbers and not want.raw:
        if len(names) > want.columns.num_classes:
            plan.problems.append(
                f"found {len(names)} class folders ({', '.join(names[:5])}, ...); expected at most {want.columns.num_classes}, "
                "the number of classes; set data.classes to it"
            )
        plan.notes.append("classes by folder: " + ", ".join(f"{labels[name]} is {name}" for name in names[:50]))
    step = min(want.part_rows, _MAX_FILES)
    for split, members in by_split.items():
        for first in range(0, len(members), step):
            some = members[first : first + step]
            plan.parts.append(
                Part(split, "images", tuple(f for f, _ in some), where=tuple(str(labels[name]) for _, name in some))
            )
    return plan


def read(part: Part, want: Want) -> Iterator[Batch]:
    shape = None if want.raw else want.columns.shape
    for first in range(0, len(part.files), want.block_rows):
        files = part.files[first : first + want.block_rows]
        bad: dict[int, str] = {}
        images: list[np.ndarray] = []
        for row, file in enumerate(files):
            try:
                with damage(file), file.open() as stream:
                    images.append(decode(stream.read(), shape))
            except BadImageError as error:
                bad[row] = str(error)
                images.append(np.zeros(shape or (1,), np.uint8))
        columns = {
            "image": _stack(images),
            "label": np.array(part.where[first : first + want.block_rows], np.int64),
            "path": np.array([file.name for file in files], object),
        }
        yield Batch(columns, Place("", files=[file.name for file in files]), bad)


def _stack(images: list[np.ndarray]) -> np.ndarray:
    if len({image.shape for image in images}) == 1:
        return np.stack(images)
    ragged = np.empty(len(images), object)
    ragged[:] = images
    return ragged
