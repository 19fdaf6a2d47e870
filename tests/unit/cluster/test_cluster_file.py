"""Cluster files: the shipped one has nothing wrong with it, and each change below is found at its place."""

from __future__ import annotations

import copy
import platform
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from raytrain_app.cluster.checks import check_cluster
from raytrain_app.cluster.document import ClusterFile, cluster_from_text, load_cluster
from raytrain_app.cluster.rules import commands
from raytrain_app.errors import JobError

DELETE = object()
HEAD, CPU, T4 = "available_node_types.head", "available_node_types.cpu", "available_node_types.gpu_t4"
API = "https://www.googleapis.com/compute/v1"
GPU = f"{T4}.node_config.guestAccelerators.0"
SPOT = f"{CPU}.node_config.scheduling"
DISK = f"{CPU}.node_config.disks.0.initializeParams"
L4_DISK = "available_node_types.gpu_l4.node_config.disks.0.initializeParams"
IMAGE, T4_IMAGE = (
    f"{CPU}.node_config.disks.0.initializeParams.sourceImage",
    f"{T4}.node_config.disks.0.initializeParams.sourceImage",
)


@pytest.fixture
def shipped(repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The shipped cluster file with a project, on a machine that is ready for it."""
    monkeypatch.chdir(repository)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    monkeypatch.setattr(platform, "python_version", lambda: "3.11.9")
    data: dict[str, Any] = yaml.safe_load((repository / "cluster.yaml").read_text())
    data = copy.deepcopy(data)
    data["provider"]["project_id"] = "demo-project"
    return data


def put(data: dict[str, Any], path: str, value: Any) -> None:
    """Sets or deletes what is at the path."""
    *parents, last = path.split(".")
    place: Any = data
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key]
    if value is DELETE:
        del place[last]
    else:
        place[int(last) if isinstance(place, list) else last] = value


def changed(data: dict[str, Any], changes: dict[str, Any]) -> ClusterFile:
    # Written out and read again without anchors, so that a change at one place is one at that place only.
    data = yaml.safe_load(yaml.dump(data, Dumper=_Plain))
    for path, value in changes.items():
        put(data, path, value)
    return cluster_from_text(yaml.dump(data, Dumper=_Plain, sort_keys=False), "cluster.yaml")


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def test_the_shipped_file_has_nothing_to_say_but_the_project(shipped: dict[str, Any], repository: Path) -> None:
    assert check_cluster(changed(shipped, {})) == []
    as_shipped = load_cluster(str(repository / "cluster.yaml"))
    (finding,) = check_cluster(as_shipped)
    assert as_shipped.at(finding.path).startswith("provider.project_id (line 1")


PROBLEMS: list[tuple[dict[str, Any], str, str]] = [
    # What Ray's schema refuses, one by one; here all at once.
    ({"cluster_nam": "x"}, "cluster_nam", "did you mean cluster_name?"),
    ({"cluster_name": DELETE}, "cluster_name", "must be given"),
    ({"max_workers": "ten"}, "max_workers", 'found "ten"; expected a whole number'),
    ({f"{CPU}.resources.CPU": 0.5}, f"{CPU}.resources.CPU", "found 0.5; expected a whole number"),
    ({f"{CPU}.max_worker": 3}, f"{CPU}.max_worker", "did you mean max_workers?"),
    ({f"{CPU}.node_config": DELETE}, f"{CPU}.node_config", "must be given"),
    # What it lets pass.
    ({"min_workers": 4}, "min_workers", "belongs under available_node_types.<type>"),
    ({"worker_nodes": {}}, "worker_nodes", "old format"),
    ({"provider.availabilty_zone": "us-west1-a"}, "provider.availabilty_zone", "did you mean availability_zone?"),
    ({"provider.availability_zone": DELETE}, "provider.availability_zone", "such as us-west1-a"),
    ({"provider.availability_zone": "us-east1-b"}, "provider.availability_zone", "expected a zone of us-west1"),
    ({"provider.project_id": None}, "provider.project_id", "put in your project's id"),
    ({"provider.project_id": "My Project"}, "provider.project_id", "a project's id, not its name"),
    ({"cluster_name": "My_Cluster"}, "cluster_name", "lower-case letters"),
    ({f"{CPU}.min_workers": 9}, f"{CPU}.min_workers", "found 9, but max_workers is 8"),
    ({f"{CPU}.min_workers": -1}, f"{CPU}.min_workers", "found -1; expected at least 0"),
    ({f"{CPU}.min_workers": 8, f"{T4}.min_workers": 3}, "max_workers", "min_workers add up to 11"),
    ({"head_node_type": "haed"}, "head_node_type", "did you mean head?"),
    # Resources against machines.
    ({f"{CPU}.resources.CPU": 6}, f"{CPU}.resources.CPU", "n2-standard-4 has 4"),
    ({f"{CPU}.resources": {}}, f"{CPU}.resources.CPU", "is missing"),
    ({f"{CPU}.resources.GPU": 1}, f"{CPU}.resources.GPU", "found 1, but the machine has none"),
    ({"available_node_types.gpu_a100.resources.GPU": 2}, "available_node_types.gpu_a100.resources.GPU", "the machine has 1"),
    ({f"{T4}.resources.GPU": DELETE}, f"{T4}.resources.GPU", "found 0, but the machine has 1"),
    ({f"{CPU}.node_config.machineType": DELETE}, f"{CPU}.node_config.machineType", "is missing"),
    # Accelerators.
    ({f"{GPU}.acceleratorType": "nvidia-tesla-t5"}, f"{GPU}.acceleratorType", "did you mean nvidia-tesla-t4?"),
    ({f"{GPU}.acceleratorType": "nvidia-l4"}, f"{GPU}.acceleratorType", "comes with the machine types that have it, such as g2-"),
    ({f"{GPU}.acceleratorCount": 3, f"{T4}.resources.GPU": 3}, f"{GPU}.acceleratorCount", "expected one of 1, 2, 4"),
    ({f"{T4}.node_config.machineType": "n2-standard-8"}, f"{GPU}.acceleratorType", "cannot be added to n2-standard-8"),
    (
        {f"{GPU}.acceleratorType": "projects/demo-project/zones/us-west1-a/acceleratorTypes/nvidia-tesla-t4"},
        f"{GPU}.acceleratorType",
        "is in us-west1-a, but availability_zone is us-west1-b",
    ),
    (
        {f"{GPU}.acceleratorType": f"{API}/projects/other/zones/us-west1-b/acceleratorTypes/nvidia-tesla-t4"},
        f"{GPU}.acceleratorType",
        "is in other, but project_id is demo-project",
    ),
    (
        {f"{T4}.node_config.metadata": {}, T4_IMAGE: "projects/p/global/images/x"},
        f"{T4}.node_config.metadata",
        "nothing installs the GPU's driver",
    ),
    # Fields of a machine.
    ({f"{CPU}.node_config.guestAccelerator": []}, f"{CPU}.node_config.guestAccelerator", "did you mean guestAccelerators?"),
    (
        {f"{SPOT}.provisioningModel": "SPOTTY"},
        f"{SPOT}.provisioningModel",
        "RESERVATION_BOUND, SPOT, STANDARD; did you mean SPOT?",
    ),
    ({f"{T4}.node_config.metadata.items.0.value": True}, f"{T4}.node_config.metadata.items.0.value", "expected text; put it in"),
    (
        {f"{DISK}.diskSizeGb": "50 GB"},
        f"{DISK}.diskSizeGb",
        'found "50 GB"; expected a whole number',
    ),
    ({f"{CPU}.node_config.disks.0.boot": "yes"}, f"{CPU}.node_config.disks.0.boot", "expected true or false"),
    ({f"{CPU}.node_config.serviceAccounts": {}}, f"{CPU}.node_config.serviceAccounts", "expected a list"),
    ({"provider.type": "google"}, "provider.type", "found google; expected gcp"),
    # Spot machines and hosts.
    ({f"{SPOT}.onHostMaintenance": "MIGRATE"}, f"{SPOT}.onHostMaintenance", "spot machines cannot be moved"),
    ({f"{SPOT}.automaticRestart": True}, f"{SPOT}.automaticRestart", "refuses it"),
    (
        {f"{T4}.node_config.scheduling": []},
        f"{T4}.node_config.scheduling.onHostMaintenance",
        "machines with GPUs cannot be moved",
    ),
    ({f"{CPU}.node_config.disks": DELETE}, f"{CPU}.node_config.disks", "needs a boot disk"),
    (
        {f"{DISK}.diskType": "pd-ssd"},
        f"{DISK}.diskType",
        "a type with its zone, such as zones/us-west1-b/diskTypes/pd-b",
    ),
    ({f"{DISK}.diskType": "zones/us-west1-a/diskTypes/pd-ssd"}, f"{DISK}.diskType", "availability_zone is us-west1-b"),
    ({f"{L4_DISK}.diskType": DELETE}, f"{L4_DISK}.diskType", "a standard disk, which g2-standard-8 does not take"),
    (
        {f"{L4_DISK}.diskType": "zones/us-west1-b/diskTypes/pd-standard"},
        f"{L4_DISK}.diskType",
        "which g2-standard-8 does not take",
    ),
    ({f"{CPU}.node_config.serviceAccounts.0.scopes": ["x"]}, f"{CPU}.node_config.serviceAccounts.0.scopes", "cannot use storage"),
    # TPUs.
    (
        {f"{CPU}.node_config.acceleratorType": "v4-8"},
        f"{CPU}.node_config.machineType",
        "no machineType; GPUs go under guestAccelerators",
    ),
    (
        {f"{CPU}.node_config": {"acceleratorType": "v4-8", "acceleratorConfig": {"type": "V4", "topology": "2x2x1"}}},
        f"{CPU}.node_config.acceleratorConfig",
        "one of the two",
    ),
    ({f"{CPU}.node_config": {"acceleratorType": "nvidia-tesla-t4"}}, f"{CPU}.node_config.acceleratorType", "such as v4-8"),
    ({f"{HEAD}.node_config": {"acceleratorType": "v4-8"}}, HEAD, "cannot be a TPU"),
    # Commands and files.
    ({"setup_commands": DELETE}, "setup_commands", "Python 3.7"),
    (
        {"setup_commands": ["~/env/bin/python -m pip install 'ray[default]==2.9.0'"]},
        "setup_commands",
        f"installs Ray 2.9.0, and here is Ray {ray.__version__}",
    ),
    (
        {"head_start_ray_commands": ["RAY_AUTH_MODE=token ray start --head"]},
        "head_start_ray_commands",
        "no worker is ever started",
    ),
    (
        {"worker_start_ray_commands": ["RAY_AUTH_MODE=token ray start --block"]},
        "worker_start_ray_commands",
        "do not find the head",
    ),
    (
        {"worker_start_ray_commands": ["RAY_AUTH_MODE=disabled ray start --address=$RAY_HEAD_IP:6379 --block"]},
        "worker_start_ray_commands",
        "is disabled here and token on the head",
    ),
    ({"file_mounts": {}}, "file_mounts", "no token reaches the nodes"),
    ({"file_mounts.~/data": "no/such/folder"}, "file_mounts.~/data", "is not there"),
]

ADVICE: list[tuple[dict[str, Any], str, str]] = [
    ({"max_workers": DELETE}, "max_workers", "Ray's default is 2"),
    ({f"{HEAD}.resources.CPU": 4}, f"{HEAD}.resources.CPU", "with 0 no worker can slow"),
    ({f"{CPU}.node_config.machineType": "n2-standard-5"}, f"{CPU}.node_config.machineType", "did you mean n2-standard-"),
    ({f"{SPOT}.instanceTerminationAction": "STOP"}, f"{SPOT}.instanceTerminationAction", "stays in the project"),
    ({SPOT: [{"preemptible": True}]}, f"{SPOT}.preemptible", "ends after 24 hours"),
    ({SPOT: [{"preemptible": True}]}, SPOT, "own form is one section"),
    (
        {f"{HEAD}.node_config.scheduling": {"preemptible": True}},
        f"{HEAD}.node_config.scheduling",
        "the cluster and all that runs on it end",
    ),
    ({f"{CPU}.node_config.disks.0.autoDelete": False}, f"{CPU}.node_config.disks.0.autoDelete", "leaves its disk behind"),
    ({f"{DISK}.diskType": DELETE}, f"{DISK}.diskType", "is slow to install on"),
    ({IMAGE: "projects/ml-images/global/images/family/tf-1-12-gpu"}, IMAGE, "is retired"),
    (
        {f"{CPU}.node_config.serviceAccounts": DELETE},
        f"{CPU}.node_config.serviceAccounts",
        "scopes: [https://www.googleapis.com/auth/cloud-platform]",
    ),
    (
        {f"{CPU}.node_config.serviceAccounts.0.email": "a@other.iam.gserviceaccount.com"},
        f"{CPU}.node_config.serviceAccounts.0.email",
        "is of project other",
    ),
    ({"setup_commands.0": "true"}, T4, "no command waits for the driver"),
    ({"available_node_types.cpu": DELETE}, "available_node_types", "every node type that takes work has GPUs"),
    ({"head_setup_commands": DELETE}, "head_setup_commands", "1.7.8"),
    ({"setup_commands": ["pip install 'ray[default]==2.60.0'"]}, "setup_commands", "whichever Python the login shell finds"),
    (
        {"setup_commands": ["python3.12 -m pip install 'ray[default]==2.60.0'"]},
        "setup_commands",
        "uses Python 3.12, and here is Python 3.11.9",
    ),
    ({"setup_commands": ["~/env/bin/python -m pip install ray"]}, "setup_commands", "does not fix the version of Ray"),
    (
        {"docker": {"image": "rayproject/ray:2.60.0-py310", "container_name": "c"}},
        "docker.image",
        "uses Python 3.10, and here is Python 3.11.9",
    ),
    ({"docker": {"image": "rayproject/ray:latest", "container_name": "c"}}, "docker.image", "an image of a fixed version"),
    ({"docker": {"image": "rayproject/ray-ml:latest-gpu", "container_name": "c"}}, "docker.image", "an image of a fixed version"),
    (
        {"docker": {"image": "rayproject/ray:2.60.0-py311", "container_name": "c"}, "file_mounts./data": "."},
        "file_mounts./data",
        "owned by root",
    ),
    (
        {"worker_start_ray_commands": ["RAY_AUTH_MODE=token ray start --address=$RAY_HEAD_IP:6379"]},
        "worker_start_ray_commands",
        "without --block",
    ),
    (
        {"worker_start_ray_commands": ["ray start --address=$RAY_HEAD_IP:6379 --block"]},
        "worker_start_ray_commands",
        "does not set RAY_AUTH_MODE",
    ),
    ({"idle_timeout_minutes": 1}, "idle_timeout_minutes", "starting one takes minutes"),
    ({f"{CPU}.max_workers": 20}, f"{CPU}.max_workers", "the cluster's max_workers is 10"),
]


@pytest.mark.parametrize(("changes", "path", "text"), PROBLEMS, ids=lambda value: value if isinstance(value, str) else "")
def test_problems(shipped: dict[str, Any], changes: dict[str, Any], path: str, text: str) -> None:
    found = [finding for finding in check_cluster(changed(shipped, changes)) if finding.fatal]
    assert [finding for finding in found if finding.path == path and text in finding.text], found


@pytest.mark.parametrize(("changes", "path", "text"), ADVICE, ids=lambda value: value if isinstance(value, str) else "")
def test_advice(shipped: dict[str, Any], changes: dict[str, Any], path: str, text: str) -> None:
    findings = check_cluster(changed(shipped, changes))
    assert [finding for finding in findings if finding.path == path and text in finding.text and not finding.fatal], findings
    assert not [finding for finding in findings if finding.fatal]


@pytest.mark.parametrize("kind", ["nvidia-tesla-t4", "projects/demo-project/zones/us-west1-b/acceleratorTypes/nvidia-tesla-t4"])
def test_short_names_and_full_urls_of_accelerators_are_fine(shipped: dict[str, Any], kind: str) -> None:
    assert check_cluster(changed(shipped, {f"{GPU}.acceleratorType": kind})) == []


def test_everything_is_found_at_once_in_the_order_of_the_lines(shipped: dict[str, Any]) -> None:
    file = changed(
        shipped, {"min_workers": 4, "provider.zone": "a", f"{CPU}.resources.CPU": 40, f"{SPOT}.automaticRestart": True}
    )
    found = [file.at(finding.path) for finding in check_cluster(file)]
    numbers = [int(place.partition("line ")[2].rstrip(")")) for place in found]
    assert len(found) == 4
    assert numbers == sorted(numbers)


def test_missing_client_packages_are_named(shipped: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "NEEDED_MODULES", {"no_such_module": "no-such-package", "yaml": "PyYAML"})
    (finding,) = check_cluster(changed(shipped, {}))
    assert finding.text == (
        "`ray up` on GCP needs no-such-package, which are not installed here: pip install 'raytrain-app[gcp]'"
    )


def test_other_providers_get_the_general_checks_only(shipped: dict[str, Any]) -> None:
    file = changed(shipped, {"provider": {"type": "aws", "region": "us-west-2"}, f"{CPU}.resources.CPU": 40, "min_workers": 1})
    assert [finding.path for finding in check_cluster(file)] == ["min_workers"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "line 1, column 5: while parsing a flow node"),
        ("- a", "expected keys and values"),
        ("", "expected keys and values"),
        ("a: \x00", "cluster.yaml: unacceptable character"),
    ],
)
def test_what_is_not_a_cluster_file(text: str, said: str) -> None:
    with pytest.raises(JobError, match=said):
        cluster_from_text(text, "cluster.yaml")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot be read: No such file"):
        load_cluster(str(tmp_path / "cluster.yaml"))


def test_keys_that_are_there_twice_are_found(shipped: dict[str, Any]) -> None:
    text = yaml.dump(shipped, Dumper=_Plain, sort_keys=False) + "cluster_name: again\n"
    (finding,) = check_cluster(cluster_from_text(text, "cluster.yaml"))
    assert (finding.path, "only the last one counts" in finding.text) == ("cluster_name", True)


@pytest.mark.parametrize("value", [None, [], "x", 3, {"a": None}])
@pytest.mark.parametrize(
    "path",
    [
        "provider",
        "available_node_types",
        CPU,
        f"{CPU}.node_config",
        f"{CPU}.resources",
        SPOT,
        "setup_commands",
        f"{CPU}.node_config.disks",
        f"{CPU}.node_config.serviceAccounts",
        "file_mounts",
        "docker",
        f"{T4}.node_config.guestAccelerators",
        f"{T4}.node_config.metadata",
        "head_node_type",
    ],
)
def test_no_wrong_kind_of_value_breaks_the_check(shipped: dict[str, Any], path: str, value: Any) -> None:
    check_cluster(changed(shipped, {path: value}))


def test_the_same_ray_reads_it(shipped: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(copy.deepcopy(shipped)))
