"""The events of a run in sentences, for those that people want to hear of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CAUSES = {
    "node_lost": "machine lost",
    "worker_lost": "worker lost",
    "server_lost": "server lost",
    "roll_back": "servers went back",
    "drain": "machine drained",
    "leave": "worker left",
    "join": "worker joined",
}
"""What to call the causes of disruptions."""

STYLES = {
    "worker_lost": "red",
    "node_lost": "red",
    "server_lost": "red",
    "roll_back": "yellow",
    "reshard_failed": "yellow",
    "checkpoint_failed": "red",
    "checkpoint_damaged": "yellow",
    "drain": "yellow",
    "leave": "yellow",
    "join": "green",
    "finish": "bold",
}
"""How to print them."""


def sentence(event: Mapping[str, Any]) -> str:
    """The event in a few words, empty for those that only machines care for."""
    kind = event["kind"]
    if kind == "start":
        return f"started with {event['workers']} workers" if event.get("workers") != 1 else "started with 1 worker"
    if kind == "join":
        return f"worker {event['worker']} joined on node {event['node'][:8]}"
    if kind == "leave":
        return f"worker {event['worker']} left"
    if kind == "drain":
        return f"the node of pool {event['pool']} is going away, its workers hand over"
    if kind in ("worker_lost", "node_lost"):
        return f"lost worker {event['worker']} ({'its node is gone' if kind == 'node_lost' else event['cause']})"
    if kind == "server_lost":
        return f"lost parameter server {event['server']}; another one has its state"
    if kind == "roll_back":
        back = f"the servers went back {event['steps']:,} steps, to {event['step']:,}"
        return f"a part of a step was lost with all who had it; {back}"
    if kind == "reshard":
        servers = event["servers"]
        return f"parameters on {servers} server{'s' if servers > 1 else ''} now, {event['seconds']:.2f} s after it was asked"
    if kind == "reshard_failed":
        return (
            f"{event['wanted']} servers of {event['cpus']:g} CPUs each did not start within scaling.wait_s = "
            f"{event['waited_s']:g} s; the run goes on with {event['servers']}"
        )
    if kind == "disruption":
        return receipt_text(event["receipt"])
    if kind == "checkpoint_failed":
        return f"a checkpoint could not be written: {event['error']}"
    if kind == "checkpoint_damaged":
        return str(event["message"])
    if kind == "resume":
        return f"going on from step {event['step']:,} ({event['source']})"
    if kind == "scale":
        return f"may have {event['least']} to {event['most']} workers now"
    if kind == "finish":
        return f"ended: {str(event['status']).replace('_', ' ')}"
    return ""


def receipt_text(receipt: Mapping[str, Any]) -> str:
    """A disruption in a few words."""
    cause = CAUSES.get(receipt["cause"], receipt["cause"])
    return f"{cause}: {receipt['workers_before']} to {receipt['workers_after']} workers, paused {receipt['paused_s']:.2f} s"
