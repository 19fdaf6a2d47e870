"""Numbers the way people read them."""

from __future__ import annotations

import time


def duration(seconds: float) -> str:
    """A stretch of time: "0.31 s", "59.5 s", "12 min 3 s", "3 h 12 min", "2 d 4 h"."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def ago(seconds: float) -> str:
    """How long ago, in one unit: "5 s", "12 min", "3 h", "8 d"."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def percent(share: float, digits: int = 1) -> str:
    """A share of one as percent; never "100 %" for less than all."""
    text = f"{100 * share:.{digits}f}"
    if share < 1 and float(text) == 100:
        text = f"{100 - 10**-digits:.{digits}f}"
    return f"{text} %"


def counted(number: int, thing: str) -> str:
    """A number of things: "no steps", "1 step", "2,000 steps"."""
    return f"1 {thing}" if number == 1 else f"{number:,} {thing}s" if number else f"no {thing}s"


def moment(time_s: float) -> str:
    """A time of day in UTC: "2026-01-31 14:05:09"."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_s))
