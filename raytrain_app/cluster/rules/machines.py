"""Machines of Compute Engine: resources, accelerators, images and what a spot machine needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from raytrain_app.cluster.catalog import Machine, accelerators, find_machine, machines, table
from raytrain_app.cluster.document import ClusterFile, Finding, did_you_mean, section, whole

SCOPES = ("https://www.googleapis.com/auth/cloud-platform", "https://www.googleapis.com/auth/devstorage.read_write")
ACCOUNT_ADVICE = (
    f"without one a worker cannot use a bucket: add serviceAccounts: [{{email: default, scopes: [{SCOPES[0]}]}}], "
    "and give that account the role Storage Object User on the bucket"
)
DRIVER_KEY = "install-nvidia-driver"
DRIVER_COMMAND = re.compile(r"nvidia-driver|cuda_installer|ubuntu-drivers")


def machine_rules(file: ClusterFile) -> Iterator[Finding]:
    """All rules of this file; there are none for other providers."""
    if section(file.data, "provider").get("type") != "gcp":
        return
    for name, node in file.node_types.items():
        path, config = f"available_node_types.{name}", section(node, "node_config")
        head = name == file.head_type
        if is_tpu(config):
            yield from _tpu(path, config, head)
            continue
        yield from _resources(path, node, config, head)
        yield from _accelerators(path, config, section(file.data, "provider"))
        yield from _scheduling(path, config, head)
        yield from _disks(path, config, section(file.data, "provider"))
        yield from _service_account(path, config, section(file.data, "provider"), head)
        if gpu_count(config):
            yield from _driver(path, config, file, node)
    yield from _somewhere_for_cpu_work(file)


def is_tpu(config: dict[str, Any]) -> bool:
    """Whether the node is a TPU: it has an accelerator of its own beside, or instead of, a machine type."""
    return "acceleratorType" in config or "acceleratorConfig" in config


def gpu_count(config: dict[str, Any]) -> int:
    """GPUs that a machine of this node_config has."""
    machine = _machine(config)
    return (machine.gpus if machine else 0) + sum(whole(gpu.get("acceleratorCount"), 0) for _, gpu in _added(config))


def hourly_price(config: dict[str, Any]) -> float | None:
    """US dollars an hour on demand with its GPUs, None if the table does not know the machine."""
    machine = _machine(config)
    if machine is None or machine.price is None:
        return None
    known = accelerators()
    names = [
        (str(gpu.get("acceleratorType")).rpartition("/")[2], whole(gpu.get("acceleratorCount"), 0)) for _, gpu in _added(config)
    ]
    if any(name not in known for name, _ in names):
        return None
    return machine.price + sum(known[name].price * count for name, count in names)


def is_spot(config: dict[str, Any]) -> bool:
    """Whether the machine may be taken away at any time."""
    plan = scheduling(config)
    return plan.get("provisioningModel") == "SPOT" or plan.get("preemptible") is True


def scheduling(config: dict[str, Any]) -> dict[str, Any]:
    """The scheduling section; Compute Engine takes it as a mapping, or as a list of mappings that it merges."""
    raw = config.get("scheduling")
    parts = raw if isinstance(raw, list) else [raw]
    return {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}


def _machine(config: dict[str, Any]) -> Machine | None:
    name = config.get("machineType")
    return find_machine(name) if isinstance(name, str) else None


def _added(config: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    raw = config.get("guestAccelerators")
    return [(number, gpu) for number, gpu in enumerate(raw) if isinstance(gpu, dict)] if isinstance(raw, list) else []


def _resources(path: str, node: dict[str, Any], config: dict[str, Any], head: bool) -> Iterator[Finding]:
    resources, machine = section(node, "resources"), _machine(config)
    if machine is None:
        name = config.get("machineType")
        if name is None and "sourceInstanceTemplate" not in config:
            yield Finding(f"{path}.node_config.machineType", "is missing; expected a machine type such as n2-standard-4")
        elif name is not None:
            yield Finding(
                f"{path}.node_config.machineType",
                f"{name} is not in the table of {table()['date']}, so its resources are not checked"
                f"{did_you_mean(str(name).rpartition('/')[2], machines())}",
                fatal=False,
            )
        return
    cpus, gpus = whole(resources.get("CPU"), -1), whole(resources.get("GPU"), 0)
    if cpus > machine.vcpus:
        yield Finding(
            f"{path}.resources.CPU", f"found {cpus}, but {machine.name} has {machine.vcpus}; more would run at once than fit"
        )
    elif cpus < 0:
        yield Finding(
            f"{path}.resources.CPU",
            f"is missing, so nothing that needs a CPU is placed there; {machine.name} has {machine.vcpus}",
        )
    elif head and cpus > 0:
        yield Finding(f"{path}.resources.CPU", f"found {cpus} on the head; with 0 no worker can slow the head down", fatal=False)
    real = gpu_count(config)
    if gpus > real:
        has = f"has {real}" if real else "has none"
        yield Finding(
            f"{path}.resources.GPU",
            f"found {gpus}, but the machine {has}: work would be placed there and find no GPU; add guestAccelerators, or take "
            "a machine type that comes with them",
        )
    elif gpus < real:
        yield Finding(
            f"{path}.resources.GPU", f"found {gpus}, but the machine has {real}, and all of them are paid for", fatal=not head
        )


def _accelerators(path: str, config: dict[str, Any], provider: dict[str, Any]) -> Iterator[Finding]:
    machine, known = _machine(config), accelerators()
    raw = config.get("guestAccelerators")
    if raw is not None and not isinstance(raw, list):
        yield Finding(f"{path}.node_config.guestAccelerators", "expected a list of {acceleratorType: ..., acceleratorCount: ...}")
    for number, gpu in _added(config):
        at = f"{path}.node_config.guestAccelerators.{number}"
        kind, count = str(gpu.get("acceleratorType", "")), gpu.get("acceleratorCount")
        yield from _location(f"{at}.acceleratorType", kind, provider)
        short = kind.rpartition("/")[2]
        built_in = {row.gpu for row in machines().values() if row.gpu}
        if short not in known:
            hint = (
                "; it comes with the machine types that have it, such as "
                f"{next(row.name for row in machines().values() if row.gpu == short)}, and cannot be added to others"
                if short in built_in
                else did_you_mean(short, known)
            )
            yield Finding(f"{at}.acceleratorType", f"found {kind or 'nothing'}; expected one of {', '.join(known)}{hint}")
            continue
        if count not in known[short].counts:
            yield Finding(f"{at}.acceleratorCount", f"found {count}; expected one of {', '.join(map(str, known[short].counts))}")
        if machine is not None and machine.family not in known[short].families:
            yield Finding(
                f"{at}.acceleratorType",
                f"{short} cannot be added to {machine.name}, only to {', '.join(known[short].families)} machines",
            )
    name = config.get("machineType")
    if isinstance(name, str):
        yield from _location(f"{path}.node_config.machineType", name, provider)


def _location(path: str, name: str, provider: dict[str, Any]) -> Iterator[Finding]:
    """A name may be a URL; then it must be one of the cluster's own project and zone."""
    for key, pattern in (("availability_zone", r"zones/([^/]+)/"), ("project_id", r"projects/([^/]+)/")):
        found, ours = re.search(pattern, name), provider.get(key)
        if found and ours and found[1] != ours:
            yield Finding(
                path, f"{name} is in {found[1]}, but {key} is {ours}; the short name {name.rpartition('/')[2]} is enough"
            )


def _scheduling(path: str, config: dict[str, Any], head: bool) -> Iterator[Finding]:
    plan, at = scheduling(config), f"{path}.node_config.scheduling"
    spot = is_spot(config)
    if spot and head:
        yield Finding(
            at, "the head is a spot machine: when it is taken away the cluster and all that runs on it end", fatal=False
        )
    if spot and plan.get("automaticRestart") is True:
        yield Finding(f"{at}.automaticRestart", "found true; Compute Engine refuses it for spot machines")
    if plan.get("provisioningModel") == "SPOT" and plan.get("instanceTerminationAction") != "DELETE":
        yield Finding(
            f"{at}.instanceTerminationAction",
            "expected DELETE: a spot machine that is only stopped stays in the project with its disk, and is not started again",
            fatal=False,
        )
    if spot and plan.get("provisioningModel") != "SPOT":
        yield Finding(
            f"{at}.preemptible",
            "is the old form, which ends after 24 hours; use provisioningModel: SPOT with instanceTerminationAction: DELETE",
            fatal=False,
        )
    needs_end = spot or gpu_count(config) > 0
    maintenance = plan.get("onHostMaintenance", "TERMINATE" if spot else "MIGRATE")
    if needs_end and maintenance == "MIGRATE":
        what = "spot machines" if spot else "machines with GPUs"
        yield Finding(
            f"{at}.onHostMaintenance", f"found {maintenance}; {what} cannot be moved while they run, so it must be TERMINATE"
        )


def _disks(path: str, config: dict[str, Any], provider: dict[str, Any]) -> Iterator[Finding]:
    disks = config.get("disks")
    if not disks:
        if "sourceInstanceTemplate" not in config:
            yield Finding(f"{path}.node_config.disks", "is missing; a machine needs a boot disk with a sourceImage")
        return
    for number, disk in enumerate(disks if isinstance(disks, list) else []):
        at = f"{path}.node_config.disks.{number}"
        if isinstance(disk, dict) and disk.get("autoDelete") is not True:
            yield Finding(
                f"{at}.autoDelete",
                "expected true: without it every machine leaves its disk behind, which is paid for",
                fatal=False,
            )
        yield from _disk_type(f"{at}.initializeParams.diskType", section(disk, "initializeParams"), config, provider)
        image = str(section(disk, "initializeParams").get("sourceImage", ""))
        family = image.rpartition("/")[2]
        if any(re.fullmatch(pattern, family) for pattern in table()["retired_images"]):
            yield Finding(
                f"{at}.initializeParams.sourceImage",
                f"image family {family} is retired; `gcloud compute images list` shows those there are",
                fatal=False,
            )


def _disk_type(at: str, parameters: dict[str, Any], config: dict[str, Any], provider: dict[str, Any]) -> Iterator[Finding]:
    machine, zone = _machine(config), provider.get("availability_zone")
    kind, good = parameters.get("diskType"), f"zones/{zone}/diskTypes/pd-balanced"
    found = re.fullmatch(r"(?:.*/)?zones/([^/]+)/diskTypes/([^/]+)", str(kind))
    refuses_standard = machine is not None and machine.family in table()["no_standard_disk"]
    if kind is None:
        drawback = f"{machine.name} does not take" if machine is not None and refuses_standard else "is slow to install on"
        yield Finding(at, f"is missing, and the default is a standard disk, which {drawback}; use {good}", fatal=refuses_standard)
    elif found is None:
        yield Finding(at, f"found {kind}; expected a type with its zone, such as {good}")
    elif found[1] != zone:
        yield Finding(at, f"found a type of {found[1]}, but availability_zone is {zone}; use {good}")
    elif found[2] == "pd-standard" and machine is not None and refuses_standard:
        yield Finding(at, f"found pd-standard, which {machine.name} does not take; use {good}")


def _service_account(path: str, config: dict[str, Any], provider: dict[str, Any], head: bool) -> Iterator[Finding]:
    accounts = config.get("serviceAccounts")
    if not accounts and not head:
        yield Finding(
            f"{path}.node_config.serviceAccounts",
            f"is missing, and Ray gives an account to the head only; {ACCOUNT_ADVICE}",
            fatal=False,
        )
    for number, account in enumerate(accounts if isinstance(accounts, list) else []):
        at = f"{path}.node_config.serviceAccounts.{number}"
        scopes = account.get("scopes") if isinstance(account, dict) else None
        if not isinstance(scopes, list) or not set(scopes) & set(SCOPES):
            yield Finding(
                f"{at}.scopes", f"expected a list with {SCOPES[0]}: without it the account cannot use storage, whatever its roles"
            )
        email = str(section(account).get("email", ""))
        found = re.fullmatch(r"[^@]+@([^.]+)\.iam\.gserviceaccount\.com", email)
        if found and found[1] != provider.get("project_id"):
            yield Finding(
                f"{at}.email", f"{email} is of project {found[1]}, and the cluster of {provider.get('project_id')}", fatal=False
            )


def _driver(path: str, config: dict[str, Any], file: ClusterFile, node: dict[str, Any]) -> Iterator[Finding]:
    """A GPU without a driver, or with one that comes late, is a node with no GPU."""
    items = section(config, "metadata").get("items")
    metadata = (
        {str(item.get("key")): item.get("value") for item in items if isinstance(item, dict)} if isinstance(items, list) else {}
    )
    images = " ".join(
        str(section(disk, "initializeParams").get("sourceImage", ""))
        for disk in config.get("disks") or []
        if isinstance(disk, dict)
    )
    commands = file.commands("initialization_commands", "setup_commands", "worker_setup_commands", "head_setup_commands")
    own = "\n".join(str(c) for key in ("initialization_commands", "worker_setup_commands") for c in node.get(key) or [])
    everything = f"{commands}\n{own}"
    installed = str(metadata.get(DRIVER_KEY, "")).lower() == "true" or "-nvidia-" in images or DRIVER_COMMAND.search(everything)
    if not installed:
        yield Finding(
            f"{path}.node_config.metadata",
            f"nothing installs the GPU's driver; with an image of deeplearning-platform-release add "
            f'{{items: [{{key: {DRIVER_KEY}, value: "True"}}]}}',
        )
    if "nvidia-smi" not in everything:
        yield Finding(
            f"{path}",
            "no command waits for the driver, which may be installed after Ray starts, and then the node has no GPU; "
            "add to setup_commands: timeout 900 bash -c 'until nvidia-smi; do sleep 5; done'",
            fatal=False,
        )


def _tpu(path: str, config: dict[str, Any], head: bool) -> Iterator[Finding]:
    at = f"{path}.node_config"
    if "machineType" in config:
        yield Finding(f"{at}.machineType", "a TPU has an acceleratorType and no machineType; GPUs go under guestAccelerators")
    if "acceleratorType" in config and "acceleratorConfig" in config:
        yield Finding(f"{at}.acceleratorConfig", "found beside acceleratorType; a TPU takes one of the two")
    kind = config.get("acceleratorType")
    if kind is not None and not re.fullmatch(r"v[0-9]+[a-z]*-[0-9]+", str(kind)):
        yield Finding(f"{at}.acceleratorType", f"found {kind}; expected a TPU type such as v4-8")
    own = config.get("acceleratorConfig")
    if own is not None and not {"type", "topology"} <= section(own).keys():
        yield Finding(f"{at}.acceleratorConfig", "expected type and topology, such as {type: V4, topology: 2x2x1}")
    if head:
        yield Finding(path, "the head cannot be a TPU; give it a machine of its own")


def _somewhere_for_cpu_work(file: ClusterFile) -> Iterator[Finding]:
    """The autoscaler does not start a GPU node for work that needs only CPUs."""
    kinds = [
        gpu_count(section(node, "node_config")) > 0 or is_tpu(section(node, "node_config"))
        for name, node in file.node_types.items()
        if name != file.head_type or whole(section(node, "resources").get("CPU"), 0) > 0
    ]
    if kinds and all(kinds):
        yield Finding(
            "available_node_types",
            "every node type that takes work has GPUs, and Ray starts none of them for work that needs CPUs only, as reading "
            "data; add a type without GPUs, or CPUs to the head",
            fatal=False,
        )
