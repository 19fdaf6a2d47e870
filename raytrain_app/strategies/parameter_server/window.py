"""A set of numbers that are handed out in order and come in nearly in order: which leases have been applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Window:
    """All numbers below `low`, and those of `above`. Takes memory for the gaps alone.

    A high-water mark would not do: retried and reordered pushes come late, and those after them must not hide them.
    """

    def __init__(self, low: int = 0, above: Iterable[int] = ()) -> None:
        self.low = low
        self.above: set[int] = set()
        for number in above:
            self.add(number)

    def __contains__(self, number: int) -> bool:
        return number < self.low or number in self.above

    def __len__(self) -> int:
        return self.low + len(self.above)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Window) and (self.low, self.above) == (other.low, other.above)

    __hash__ = None  # type: ignore[assignment]

    def add(self, number: int) -> bool:
        """Whether `number` is new; it is in the set from now on."""
        if number in self:
            return False
        self.above.add(number)
        while self.low in self.above:
            self.above.remove(self.low)
            self.low += 1
        return True

    def discard(self, number: int) -> None:
        """Takes `number` out if it is in the set."""
        self.above.discard(number)
        if number < self.low:
            self.above.update(range(number + 1, self.low))
            self.low = number

    def missing(self, stop: int, start: int = 0) -> list[int]:
        """The numbers of [start, stop) that are not in the set, ascending."""
        return [number for number in range(max(start, self.low), stop) if number not in self.above]

    def to_json(self) -> dict[str, Any]:
        return {"low": self.low, "above": sorted(self.above)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Window:
        return cls(values["low"], values["above"])
