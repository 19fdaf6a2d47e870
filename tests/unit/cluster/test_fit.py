"""Whether workers fit into a cluster, how many, and for how much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from raytrain_app.cluster.catalog import accelerators, find_machine, machines, spot_range
from raytrain_app.cluster.document import ClusterFile
from raytrain_app.cluster.fit import capacity, fit_problems, fit_rows, places
from raytrain_app.job import Job, job_from_dict


@pytest.fixture
def file(repository: Path) -> ClusterFile:
    return ClusterFile("cluster.yaml", yaml.safe_load((repository / "cluster.yaml").read_text()))


def make_job(workers: Any = 1, storage: str = "gs://bucket/runs", **resources: float) -> Job:
    return job_from_dict(
        {
            "name": "first",
            "task": "mnist",
            "model": {"name": "cnn"},
            "train": {"virtual_shards": 128},
            "scaling": {"workers": workers, "resources_per_worker": resources},
            "storage": storage,
        }
    )


@pytest.mark.parametrize(
    ("name", "price"),  # as published for us-central1
    [
        ("n1-standard-1", 0.0475),
        ("e2-standard-2", 0.06701),
        ("n2-standard-4", 0.1942),
        ("c2-standard-8", 0.4176),
        ("g2-standard-4", 0.7068),
    ],
)
def test_published_prices(name: str, price: float) -> None:
    machine = find_machine(f"zones/us-central1-a/machineTypes/{name}")
    assert machine is not None
    assert machine.price == pytest.approx(price, rel=2e-3)


def test_the_table_is_whole() -> None:
    for machine in machines().values():
        assert machine.vcpus > 0
        assert machine.gib > 0
        assert machine.price is not None
        assert bool(machine.gpu) == bool(machine.gpus)
    assert all(row.price > 0 and row.counts and row.families for row in accelerators().values())
    assert spot_range(1.0) == pytest.approx((0.09, 0.40))


def test_custom_and_unknown_machines() -> None:
    custom = find_machine("n2-custom-6-20480")
    assert custom is not None
    assert (custom.vcpus, custom.gib, custom.family) == (6, 20, "n2")
    assert find_machine("n9-standard-4") is None


def test_workers_on_the_shipped_cluster(file: ClusterFile) -> None:
    cpu_job = make_job("1..40")
    assert [(place.name, place.per_node, place.nodes) for place in places(cpu_job, file)] == [("cpu", 4, 8)]
    assert list(fit_problems(cpu_job, file)) == []
    rows = dict(fit_rows(cpu_job, file))
    assert rows["room"] == "for 32 workers, less than the 40 that the job can use"
    assert rows["1 worker"].startswith("head and 1 cpu, $0.33 an hour on demand")
    gpu_job = make_job("2..12", GPU=1)
    assert [place.name for place in places(gpu_job, file)] == ["gpu_t4", "gpu_l4", "gpu_a100"]  # the cheapest first
    assert capacity(places(gpu_job, file), file) == 10
    assert dict(fit_rows(gpu_job, file))["10 workers"].startswith("head and 4 gpu_t4 and 4 gpu_l4 and 2 gpu_a100, $")


def test_the_clusters_own_limit_counts(file: ClusterFile) -> None:
    file.data["max_workers"] = 2
    assert capacity(places(make_job(4), file), file) == 8
    assert list(fit_problems(make_job(9), file)) == [
        "scaling.workers: found 9, but cluster.yaml has room for 8 at most; raise max_workers there, or ask for fewer"
    ]


def test_a_head_with_cpus_takes_workers_too(file: ClusterFile) -> None:
    file.data["available_node_types"]["head"]["resources"] = {"CPU": 2}
    job = make_job("1..3", CPU=1)
    assert capacity(places(job, file), file) == 34
    assert dict(fit_rows(job, file))["1 worker"].startswith("head, $0.13 an hour on demand")


def test_prices_that_are_not_known_are_not_guessed(file: ClusterFile) -> None:
    file.data["available_node_types"]["cpu"]["node_config"]["machineType"] = "n9-standard-4"
    assert dict(fit_rows(make_job(1), file))["1 worker"] == "head and 1 cpu; not all of their prices are known"


def test_what_does_not_fit_is_said(file: ClusterFile) -> None:
    (text,) = fit_problems(make_job(1, CPU=64), file)
    assert "no node type of cluster.yaml can hold a worker of {CPU: 64}: head has {}; cpu has {CPU: 4}" in text
    (text,) = fit_problems(make_job(1, TPU=4), file)
    assert text.startswith("scaling.resources_per_worker.TPU: training on TPUs is not available yet")
    (text,) = fit_problems(make_job(1, storage="runs"), file)
    assert text.startswith("storage: found runs, a folder of its own on every machine")
    assert list(fit_problems(make_job(1, storage="/mnt/shared/runs"), file)) == []


def test_a_bucket_needs_an_account_on_the_workers(file: ClusterFile) -> None:
    del file.data["available_node_types"]["cpu"]["node_config"]["serviceAccounts"]
    (text,) = fit_problems(make_job(1), file)
    assert text.startswith("available_node_types.cpu.node_config.serviceAccounts: is missing")
    assert "add serviceAccounts: [{email: default, scopes: [https://www.googleapis.com/auth/cloud-platform]}]" in text


def test_keras_needs_tensorflow_on_the_nodes(file: ClusterFile) -> None:
    job = make_job(1).model_copy(update={"framework": "tensorflow"})
    (text,) = fit_problems(job, file)
    assert text.startswith("setup_commands: the job needs TensorFlow, and no command installs it")
    file.data["setup_commands"][-2] = file.data["setup_commands"][-2].replace("[gcp]", "[gcp,tensorflow]")
    assert list(fit_problems(job, file)) == []


def test_a_tpu_type_holds_no_workers(file: ClusterFile) -> None:
    file.data["available_node_types"]["tpu"] = {"resources": {"CPU": 96, "TPU": 4}, "node_config": {"acceleratorType": "v4-8"}}
    assert [place.name for place in places(make_job(1), file)] == ["cpu"]
