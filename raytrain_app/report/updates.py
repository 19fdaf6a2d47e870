"""What the driver tells whoever watches a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Update:
    """One thing that happened in a run.

    Attributes:
        kind: "phase" is what the run is doing now ("starting 2 workers"); "note" something worth knowing once (a warning);
            "step" and "epoch" carry a line of metrics.jsonl, "event" one of events.jsonl, "result" the content of result.json.
        text: a sentence for people. Empty for steps, epochs and events that only machines care for.
        record: the line of metrics.jsonl or events.jsonl, or result.json; else empty. Lines of metrics also have "total_steps",
            the steps of the whole run. "step" counts the steps applied since the run began and "epoch" starts at 1; "samples"
            are those applied since the run began; "time" is in seconds since 1970.
    """

    kind: Literal["phase", "step", "epoch", "event", "note", "result"]
    text: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
