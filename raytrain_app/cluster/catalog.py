"""What machine types of Compute Engine have and cost, from the dated table in gcp.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

CUSTOM = re.compile(r"(?:(?P<family>[a-z0-9]+)-)?custom-(?P<vcpus>[0-9]+)-(?P<mib>[0-9]+)(-ext)?")


@dataclass(frozen=True)
class Machine:
    """A machine type.

    Attributes:
        name: without zone or project.
        vcpus: virtual CPUs, which are what Ray calls CPU.
        gib: memory.
        gpu: type of the GPUs it comes with, empty if none.
        gpus: how many of them.
        price: US dollars an hour on demand, None if the table has none.
    """

    name: str
    vcpus: int
    gib: float
    gpu: str = ""
    gpus: int = 0
    price: float | None = None

    @property
    def family(self) -> str:
        """As in n1 or g2."""
        return "n1" if self.name.startswith("custom-") else self.name.partition("-")[0]


@dataclass(frozen=True)
class Accelerator:
    """A GPU that can be added to machines of the given families."""

    families: tuple[str, ...]
    counts: tuple[int, ...]
    price: float


@cache
def table() -> dict[str, Any]:
    """The table as it is in gcp.yaml."""
    data: dict[str, Any] = yaml.safe_load(files("raytrain_app.cluster").joinpath("gcp.yaml").read_text(encoding="utf-8"))
    return data


@cache
def machines() -> dict[str, Machine]:
    """All machine types of the table, by name."""
    return {machine.name: machine for machine in (*_plain(), *_with_gpus())}


@cache
def accelerators() -> dict[str, Accelerator]:
    """GPUs that can be added to machines, by name."""
    return {
        name: Accelerator(tuple(row["families"]), tuple(row["counts"]), row["price"])
        for name, row in table()["accelerators"].items()
    }


def find_machine(name: str) -> Machine | None:
    """The machine type of that name or URL, custom ones among them; None if it is not known."""
    short = name.rpartition("/")[2]
    if custom := CUSTOM.fullmatch(short):
        vcpus, gib = int(custom["vcpus"]), int(custom["mib"]) / 1024
        return Machine(short, vcpus, gib, price=_price(custom["family"] or "n1", vcpus, gib))
    return machines().get(short)


def prices_note() -> str:
    """What the prices are, of when, and whose."""
    return (
        f"Prices are estimates: Google's list prices of {table()['date']} for us-central1 ({table()['source']}), without disks "
        "and traffic. Spot prices change monthly, and are shown as the range that Google promises; other regions differ"
    )


def spot_range(price: float) -> tuple[float, float]:
    """Least and most that a spot machine of this price on demand may cost."""
    least, most = table()["spot_discount"]
    return price * (1 - most), price * (1 - least)


def _plain() -> Iterator[Machine]:
    for family, row in table()["families"].items():
        for kind, gib in row["kinds"].items():
            for vcpus in row["sizes"]:
                yield Machine(f"{family}-{kind}-{vcpus}", vcpus, vcpus * gib, price=_price(family, vcpus, vcpus * gib))


def _with_gpus() -> Iterator[Machine]:
    for name, row in table()["with_gpus"].items():
        yield Machine(name, row["vcpus"], row["gib"], row["gpu"], row["gpus"], row["price"])


def _price(family: str, vcpus: int, gib: float) -> float | None:
    row = table()["families"].get(family)
    return None if row is None else row["vcpu"] * vcpus + row["gib"] * gib
