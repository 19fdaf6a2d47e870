"""Whether a job's workers fit into a cluster, and what they cost an hour."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raytrain_app.cluster.catalog import prices_note, spot_range
from raytrain_app.cluster.document import ClusterFile, section, whole
from raytrain_app.cluster.nodes import room
from raytrain_app.cluster.rules.commands import setup
from raytrain_app.cluster.rules.machines import ACCOUNT_ADVICE, hourly_price, is_spot, is_tpu
from raytrain_app.job import Job


@dataclass(frozen=True)
class Place:
    """A node type that can hold workers of a job.

    Attributes:
        name: of the node type.
        per_node: workers that one node holds.
        nodes: how many there can be.
        price: US dollars an hour for a node on demand, None if not known.
        spot: it may be taken away at any time, and costs less.
    """

    name: str
    per_node: int
    nodes: int
    price: float | None
    spot: bool

    @property
    def price_per_worker(self) -> float:
        """Infinite where the price is not known."""
        return math.inf if self.price is None else self.price / self.per_node


def places(job: Job, file: ClusterFile) -> list[Place]:
    """The node types for the job's workers: the head, which is there anyway, and then the cheapest for a worker first.

    Ray starts no node with GPUs for work that needs only CPUs, so those are left out for such a job.
    """
    needed = {name: amount for name, amount in job.scaling.resources_per_worker.items() if amount and name != "memory"}
    found = []
    for name, node in file.node_types.items():
        config = section(node, "node_config")
        resources = {key: float(whole(amount, 0)) for key, amount in section(node, "resources").items()}
        if is_tpu(config) or (resources.get("GPU", 0) > 0 and not needed.get("GPU")):
            continue
        head = name == file.head_type
        nodes = 1 if head else min(whole(node.get("max_workers"), file.max_workers), file.max_workers)
        per_node = room(resources, needed)
        if per_node and nodes:
            found.append(Place(name, per_node, nodes, hourly_price(config), is_spot(config)))
    return sorted(found, key=lambda place: (place.name != file.head_type, place.price_per_worker, place.name))


def capacity(options: Sequence[Place], file: ClusterFile) -> int:
    """The most workers that can run at once, within the limits of the types and of the cluster."""
    left, workers = file.max_workers, 0
    for place in sorted(options, key=lambda place: -place.per_node):
        nodes = place.nodes if place.name == file.head_type else min(place.nodes, left)
        left -= 0 if place.name == file.head_type else nodes
        workers += nodes * place.per_node
    return workers


def fit_problems(job: Job, file: ClusterFile) -> Iterator[str]:
    """Why the job cannot run on the cluster, as sentences that name the key."""
    workers, per_worker = job.scaling.workers, job.scaling.resources_per_worker
    if any(name.startswith("TPU") for name, amount in per_worker.items() if amount):
        yield "scaling.resources_per_worker.TPU: training on TPUs is not available yet; expected CPU or GPU"
        return
    options = places(job, file)
    most = capacity(options, file)
    if not options:
        have = "; ".join(f"{name} has {_amounts(section(node, 'resources'))}" for name, node in file.node_types.items())
        yield f"scaling.resources_per_worker: no node type of {file.source} can hold a worker of {_amounts(per_worker)}: {have}"
    elif most < workers.min:
        advice = "raise max_workers there, or ask for fewer"
        yield f"scaling.workers: found {workers}, but {file.source} has room for {most} at most; {advice}"
    if "://" not in job.storage and not job.storage.startswith("/"):
        yield f"storage: found {job.storage}, a folder of its own on every machine; expected a bucket such as gs://my-bucket/runs"
    if job.framework == "tensorflow" and not section(file.data, "docker").get("image") and "tensorflow" not in setup(file):
        yield "setup_commands: the job needs TensorFlow, and no command installs it; in the shipped file write [gcp,tensorflow]"
    if job.storage.startswith("gs://") and section(file.data, "provider").get("type") == "gcp":
        for place in options:
            config = section(file.node_types[place.name], "node_config")
            if place.name != file.head_type and not config.get("serviceAccounts"):
                yield f"available_node_types.{place.name}.node_config.serviceAccounts: is missing, and {ACCOUNT_ADVICE}"


def fit_rows(job: Job, file: ClusterFile) -> Iterator[tuple[str, str]]:
    """Rows for the plan: where workers go, how many there can be, and the price of an hour."""
    options = places(job, file)
    most = min(capacity(options, file), job.scaling.workers.max)
    yield "node types", "; ".join(f"{place.name} holds {place.per_node}, up to {place.nodes} of them" for place in options)
    if most < job.scaling.workers.max:
        yield "room", f"for {most} workers, less than the {job.scaling.workers.max} that the job can use"
    for count in sorted({job.scaling.workers.min, most}):
        yield f"{count} worker{'s' if count > 1 else ''}", price_text(count, options, file)
    yield "prices", prices_note()


def price_text(workers: int, options: Sequence[Place], file: ClusterFile) -> str:
    """The cheapest nodes for that many workers beside the head, and what they cost an hour."""
    head = hourly_price(section(file.node_types.get(file.head_type), "node_config"))
    chosen, prices = [], [(head, False)]
    for place in options:
        nodes = min(place.nodes, -(-workers // place.per_node))
        workers -= nodes * place.per_node
        if nodes > 0 and place.name != file.head_type:
            chosen.append(f"{nodes} {place.name}")
            prices += [(place.price, place.spot)] * nodes
        if workers <= 0:
            break
    nodes_text = " and ".join(["head", *chosen])
    known = [(price, spot) for price, spot in prices if price is not None]
    if len(known) < len(prices):
        return f"{nodes_text}; not all of their prices are known"
    text = f"{nodes_text}, ${sum(price for price, _ in known):.2f} an hour on demand"
    if not any(spot for _, spot in known):
        return text
    least, most = (sum(spot_range(price)[end] if spot else price for price, spot in known) for end in (0, 1))
    return f"{text}, ${least:.2f} to ${most:.2f} as spot machines"


def _amounts(resources: dict[str, Any]) -> str:
    amounts = ", ".join(f"{name}: {amount:g}" for name, amount in resources.items() if isinstance(amount, int | float) and amount)
    return f"{{{amounts}}}"
