"""Machines that do not come, since the autoscaler did not get them or itself fails: it tells nobody but its own log."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path

from raytrain_app.cluster.nodes import session_logs

LOOK_S = 5.0
"""How often to look; the autoscaler itself acts as often."""
LOG_BYTES = 100_000
FAILED = re.compile(r"Failed to launch \d+ nodes of type (?P<kind>\S+): (?P<said>.+)")
LAUNCHED = re.compile(r"Launched \d+ nodes of type (?P<kind>\S+)\.")
# Google's refusals: of a request (googleapiclient's HttpError) and of an operation that was begun (a dict, printed).
MESSAGES = (
    re.compile(r'returned "(?P<message>.*?)"\.? ?(?:Details|>)'),
    re.compile(r"""['"]message['"]: (['"])(?P<message>.*?)\1"""),
)
LONGEST = 300
# A round of the autoscaler that came to nothing, and the error that it had.
ROUND = re.compile(r"(?P<time>\S+ \S+)\tWARNING monitor\.py:\d+ -- No autoscaling state to report")
ERROR = re.compile(r"\S+ \S+\tERROR autoscaler\.py:\d+ -- (?P<said>.+)")
ROUNDS = 3
"""So many failed rounds in a row are no accident any more: a machine that goes while it is asked about makes one fail."""
ROUND_S = 20.0
"""Longest time between two rounds."""
ADVICE = {
    r"(?i)quota": "ask for a larger quota in the Google Cloud console, or use another machine type or region",
    r"(?i)exhausted|enough resources|stockout": "the zone has none to give; another zone or machine type may have some",
    r"(?i)permission|forbidden": "give the head's service account the roles that `raytrain cluster check` names",
}


class LaunchFailures:
    """Why machines have not come since this was made.

    The autoscaler's log is on the head, where the drivers of submitted jobs run; elsewhere nothing is known.

    Attributes:
        reason: the newest, as a sentence; empty where all came or nobody knows.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._log = session_logs() / "monitor.log"
        self._looked_s = time.monotonic()
        self._before = set(_last_lines(self._log))  # each line has its time
        self._told = {""}

    def news(self) -> str:
        """The reason where it was not told before, else empty. Looks every few seconds only."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return ""
        self._looked_s = now_s
        lines = _last_lines(self._log)
        since, stuck = failing(lines, datetime.now())
        self.reason = stuck or last_failure(line for line in lines if line not in self._before)
        fresh = (since or self.reason) not in self._told
        self._told.add(since or self.reason)
        return self.reason if fresh else ""


def last_failure(lines: Iterable[str]) -> str:
    """Why machines of some type could not be had when that was last tried, as a sentence; empty if they could.

    Args:
        lines: of the autoscaler's log, the oldest first.
    """
    failed: dict[str, str] = {}
    for line in lines:
        if found := FAILED.search(line):
            failed.pop(found["kind"], None)  # so that the newest comes last
            failed[found["kind"]] = found["said"]
        elif found := LAUNCHED.search(line):
            failed.pop(found["kind"], None)
    if not failed:
        return ""
    kind, said = list(failed.items())[-1]
    return f"the autoscaler could not start a machine of type {kind}: {_message(said)}{_advice(said)}"


def _message(said: str) -> str:
    messages = (pattern.search(said) for pattern in MESSAGES)
    return next((found["message"] for found in messages if found), said).strip().rstrip(".")[:LONGEST]


def _advice(said: str) -> str:
    return next((f"; {text}" for pattern, text in ADVICE.items() if re.search(pattern, said)), "")


def failing(lines: Iterable[str], now: datetime) -> tuple[str, str]:
    """Whether the autoscaler itself fails, one round after the other.

    Args:
        lines: of its log, the oldest first.
        now: local time, as in the log.

    Returns:
        The time of the first round that failed, and a sentence; both empty where it works.
    """
    rounds: list[datetime] = []
    said = ""
    for line in lines:
        if found := ERROR.match(line):
            said = found["said"]
        elif found := ROUND.match(line):
            at = datetime.strptime(found["time"], "%Y-%m-%d %H:%M:%S,%f")
            rounds = [*rounds, at] if rounds and at - rounds[-1] < timedelta(seconds=ROUND_S) else [at]
    if len(rounds) < ROUNDS or now - rounds[-1] > timedelta(seconds=ROUND_S):
        return "", ""
    since = f"{rounds[0]:%H:%M:%S}"
    return since, (
        f"the autoscaler has failed since {since}, and starts no machine meanwhile: {_message(said)}{_advice(said)}; its log "
        "is on the head (`ray monitor cluster.yaml`). If it does not recover, `ray up cluster.yaml` starts it anew, and ends "
        "the runs that are there: submit them with --resume"
    )


def _last_lines(log: Path) -> list[str]:
    """The end of the log; nothing where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
