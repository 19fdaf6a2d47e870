"""What a user is told when the cluster is too small."""

from __future__ import annotations

from raytrain_app.cluster.nodes import Node, beside, room
from raytrain_app.cluster.sharing import Holdings
from raytrain_app.job import job_from_dict
from raytrain_app.scaling import Retire, Start
from raytrain_app.supervisor import _lack, _places, _replicas


def test_the_lack_names_need_and_supply() -> None:
    scaling = {"workers": "4..8", "resources_per_worker": {"CPU": 2, "GPU": 1, "fast_disk": 0.5}}
    job = job_from_dict({"name": "unit", "task": "synthetic", "model": {"name": "linear"}, "scaling": scaling})
    nodes = [Node("a", "10.0.0.1", {"CPU": 8.0, "GPU": 1.0, "fast_disk": 1.0}), Node("b", "10.0.0.2", {"CPU": 4.0, "GPU": 1.0})]
    assert _lack(job, 1, nodes) == (
        "the job needs 4 workers of {CPU: 2, GPU: 1, fast_disk: 0.5}, and the cluster has room for 1: "
        "2 nodes with {CPU: 12, GPU: 2, fast_disk: 1} in all"
    )


def test_one_is_said_as_one() -> None:
    scaling = {"workers": 1, "resources_per_worker": {"CPU": 9}}
    job = job_from_dict({"name": "unit", "task": "synthetic", "model": {"name": "linear"}, "scaling": scaling})
    assert _lack(job, 0, [Node("a", "10.0.0.1", {"CPU": 8.0})]) == (
        "the job needs 1 worker of {CPU: 9}, and the cluster has room for 0: 1 node with {CPU: 8} in all"
    )


def test_the_lack_names_those_who_have_the_rest() -> None:
    scaling = {"workers": 1, "resources_per_worker": {"CPU": 4}}
    job = job_from_dict({"name": "unit", "task": "synthetic", "model": {"name": "linear"}, "scaling": scaling})
    held = Holdings(frozenset(), {"a": {"CPU": 3.0, "memory": 1.0}})
    left = held.left([Node("a", "10.0.0.1", {"CPU": 4.0, "GPU": 1.0}), Node("b", "10.0.0.2", {"CPU": 2.0})])
    assert [dict(node.resources) for node in left] == [{"CPU": 1.0, "GPU": 1.0}, {"CPU": 2.0}]
    assert _lack(job, 0, left).endswith("2 nodes with {CPU: 3} in all, which is what others on the cluster leave")


def test_workers_fit_by_the_scarcest_resource() -> None:
    assert room({"CPU": 8.0, "GPU": 3.0}, {"CPU": 2.0, "GPU": 1.0}) == 3
    assert room({"CPU": 8.0}, {"CPU": 1.0, "GPU": 1.0}) == 0
    assert room({"CPU": 2.0}, {"CPU": 0.1, "GPU": 0.0}) == 20
    assert room({"CPU": 0.3}, {"CPU": 0.1}) == 3


def test_servers_leave_the_rest_to_the_workers() -> None:
    nodes = [Node("a", "10.0.0.1", {"CPU": 2.0, "GPU": 1.0}), Node("b", "10.0.0.2", {"CPU": 4.0})]
    left = beside(nodes, first="a", cpus=1.0, count=3)  # one beside the driver, two where most is left
    assert [node.resources for node in left] == [{"CPU": 1.0, "GPU": 1.0}, {"CPU": 2.0}]
    assert [node.resources for node in beside(nodes, "a", 3.0, 1)] == [{}, {}], "there is no room for the first one"
    assert [node.resources for node in beside(nodes, "a", 2.0, 4)] == [{}, {}]


def test_the_lack_names_the_servers_too() -> None:
    strategy = {"name": "parameter_server", "servers": 2, "server_cpus": 4}
    job = job_from_dict({"name": "unit", "task": "synthetic", "model": {"name": "linear"}, "strategy": strategy})
    assert _lack(job, 0, [Node("a", "10.0.0.1", {"CPU": 0.0})]).endswith(
        "1 node with {CPU: 0} in all beside 2 parameter servers of {CPU: 4}"
    )


def test_a_replica_needs_room_on_one_node() -> None:
    strategy = {"name": "model_parallel", "fsdp": 2, "tensor": 2}
    scaling = {"workers": "4..8"}
    raw = {"name": "unit", "task": "tiny_gpt", "model": {"name": "gpt"}, "strategy": strategy, "scaling": scaling}
    job = job_from_dict(raw)
    nodes = [Node("a", "10.0.0.1", {"CPU": 7.0}), Node("b", "10.0.0.2", {"CPU": 3.0})]
    assert _places(job, nodes) == 4
    assert "room for 0, with the 4 of each replica on one node: 1 node" in _lack(job, _places(job, nodes[1:]), nodes[1:])
    assert _replicas(Start("a", 2), 4) == [Start("a", 4), Start("a", 4)], "a pool each"
    assert _replicas(Retire(3), 4) == [Retire(3)]
