"""The well-known data sets: where they are published, what their files must contain, and where other tools put them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RAW_SIZES = {
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
}


@dataclass(frozen=True)
class KnownFile:
    """A published gzip file: its size and sha256 (hex), and the sha256 of what it unpacks to."""

    name: str
    size: int
    sha256: str
    raw_sha256: str


@dataclass(frozen=True)
class KnownSet:
    """A published data set.

    Attributes:
        title: its name for people.
        mirrors: folders to download from, in order of preference; each ends with a slash.
        files: images and labels for training and testing.
        folders: where torchvision, Keras and Debian keep their copies, relative to the current folder, home, or root.
    """

    title: str
    mirrors: tuple[str, ...]
    files: tuple[KnownFile, ...]
    folders: tuple[str, ...]


KNOWN = {
    "mnist": KnownSet(
        "MNIST",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        (
            KnownFile(
                "train-images-idx3-ubyte.gz",
                9_912_422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            ),
            KnownFile(
                "train-labels-idx1-ubyte.gz",
                28_881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            ),
            KnownFile(
                "t10k-images-idx3-ubyte.gz",
                1_648_877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            ),
            KnownFile(
                "t10k-labels-idx1-ubyte.gz",
                4_542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
        ),
        ("./data/MNIST/raw", "./MNIST/raw", "~/data/MNIST/raw", "~/.keras/datasets/mnist.npz"),
    ),
    "fashion-mnist": KnownSet(
        "Fashion-MNIST",
        ("https://storage.googleapis.com/tensorflow/tf-keras-datasets/",),
        (
            KnownFile(
                "train-images-idx3-ubyte.gz",
                26_421_880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            ),
            KnownFile(
                "train-labels-idx1-ubyte.gz",
                29_515,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            ),
            KnownFile(
                "t10k-images-idx3-ubyte.gz",
                4_422_102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            ),
            KnownFile(
                "t10k-labels-idx1-ubyte.gz",
                5_148,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            ),
        ),
        (
            "./data/FashionMNIST/raw",
            "./FashionMNIST/raw",
            "~/data/FashionMNIST/raw",
            "~/.keras/datasets/fashion-mnist",
            "/usr/share/datasets/fashion-mnist",
        ),
    ),
}

KERAS_NPZ = ("mnist.npz", 11_490_434, "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1")


def published_name(name: str) -> str | None:
    """The published name, without .gz, that a file's name stands for (a dot may be in a dash's place); None if for none."""
    base = re.sub(r"\.gz$", "", os.path.basename(name).lower()).replace(".", "-")
    return base if base in RAW_SIZES else None


def title_of(raw_sha256: str) -> str | None:
    """The title of the data set of which a file unpacks to content with this checksum."""
    return next((known.title for known in KNOWN.values() for file in known.files if file.raw_sha256 == raw_sha256), None)


def expected(name: str) -> str:
    """What the published file of this name is like, as the end of a sentence; empty if there is none."""
    published = published_name(name)
    same = [(known.title, file) for known in KNOWN.values() for file in known.files if file.name == f"{published}.gz"]
    return " or ".join(f"{title}'s {file.size:,} bytes with sha256 {file.sha256}" for title, file in same)


def expected_raw(published: str) -> str:
    """What the published file of this name (without .gz) unpacks to, as the end of a sentence."""
    same = [(known.title, file) for known in KNOWN.values() for file in known.files if file.name == f"{published}.gz"]
    return " or ".join(f"{file.raw_sha256} ({title})" for title, file in same)


def existing_folders(name: str) -> Iterator[str]:
    """Folders (or a file) of other tools that hold all of data set `name`, by names and sizes."""
    known = KNOWN[name]
    for folder in known.folders:
        path = Path(folder).expanduser()
        if path.suffix == ".npz":
            if path.is_file() and path.stat().st_size == KERAS_NPZ[1]:
                yield str(path)
        elif all(_has(path, file) for file in known.files):
            yield str(path)


def _has(folder: Path, file: KnownFile) -> bool:
    raw = file.name.removesuffix(".gz")
    dotted = raw.replace("-idx", ".idx")
    sizes = dict.fromkeys((raw, dotted), RAW_SIZES[raw])
    return (folder / file.name).is_file() or any(
        (folder / n).is_file() and (folder / n).stat().st_size == s for n, s in sizes.items()
    )
