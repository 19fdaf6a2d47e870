"""A machine with a network of its own on this host: a Ray node in a network namespace, whose cable can be pulled."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from raytrain_app.cluster.local import LocalNodes
from raytrain_app.cluster.nodes import living_nodes

START_S = 60.0
MAC = "02:00:00:00:00:02"


def lacking() -> str:
    """Why such a machine cannot be made here, empty if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "it needs root on Linux, for a network namespace"
    name = f"rt{os.getpid()}"
    tried = subprocess.run(
        f"ip netns add {name} && ip netns del {name} && ip link add {name} type bridge && ip link del {name}",
        shell=True,
        capture_output=True,
        text=True,
    )
    return f"a network namespace cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


class FarMachine:
    """See the module. It has one CPU for workers, and has joined the cluster.

    Args:
        nodes: the cluster.
        folder: for the node's output.
    """

    def __init__(self, nodes: LocalNodes, folder: Path) -> None:
        number, name = os.getpid() % 250, f"rt{os.getpid()}"
        self._name, self._bridge, self._cable, inner = name, f"{name}b", f"{name}o", f"{name}i"
        self.address, here = f"10.79.{number}.2", f"10.79.{number}.1"
        # With the neighbour known for good, what is sent to a machine that is cut off vanishes without a word.
        _run(
            f"ip netns add {name} && ip link add {self._bridge} type bridge && ip addr add {here}/24 dev {self._bridge}"
            f" && ip link add {self._cable} type veth peer name {inner} address {MAC} netns {name}"
            f" && ip link set {self._cable} master {self._bridge} up && ip link set {self._bridge} up"
            f" && ip neigh replace {self.address} lladdr {MAC} dev {self._bridge} nud permanent"
            f" && ip -n {name} addr add {self.address}/24 dev {inner}"
            f" && ip -n {name} link set {inner} up && ip -n {name} link set lo up && ip -n {name} route add default via {here}"
        )
        command = ["ip", "netns", "exec", name, str(Path(sys.executable).with_name("ray")), "start", "--block"]
        command += [f"--address={nodes.address}", f"--node-ip-address={self.address}", "--num-cpus=1"]
        with (folder / "far.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--object-store-memory=200000000"],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={"RAY_AUTH_MODE": "disabled", **os.environ},
            )
        deadline_s = time.monotonic() + START_S
        while not (found := [node.node_id for node in living_nodes() if node.host == self.address]):
            assert time.monotonic() < deadline_s, (folder / "far.log").read_text()
            time.sleep(0.1)
        self.node_id = found[0]

    def cut_off(self) -> None:
        """Drops all packets from and to it; nobody is told, and its processes live on."""
        _run(f"ip link set {self._cable} down")

    def reconnect(self) -> None:
        """Lets packets pass again."""
        _run(f"ip link set {self._cable} up")

    def close(self) -> None:
        """Ends all that runs on it, and its network."""
        for child in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._process.kill()
        self._process.wait()
        _run(f"ip link del {self._cable} && ip link del {self._bridge} && ip netns del {self._name}")


@contextlib.contextmanager
def far_machine(nodes: LocalNodes) -> Iterator[FarMachine]:
    """One that is gone after the block."""
    with tempfile.TemporaryDirectory() as folder:
        machine = FarMachine(nodes, Path(folder))
        try:
            yield machine
        finally:
            machine.close()


def _run(command: str) -> None:
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
