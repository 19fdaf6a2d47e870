"""Machines of Compute Engine on one Linux host: network namespaces on a private bridge, each with a process tree of its own.

A machine shares the host's files but for its home folders, /run, /tmp/ray and the list of users. It runs a real sshd. Needs root,
iproute2, util-linux, openssh-server, procps and rsync.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

IMAGE = Path(__file__).parent / "image"
PROGRAMS = ("ip", "unshare", "nsenter", "sshd", "ssh", "ssh-keygen", "rsync", "pgrep")
USER = "ubuntu"
SHUTDOWN_S = 30.0
"""What Compute Engine gives a spot machine from the notice to the end."""
INIT = """
set -e
mount --bind {folder}/ray /tmp/ray
mount --bind {folder}/home /home
mount --bind {folder}/passwd /etc/passwd
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd /run/services
exec {sshd} -D -e -f {folder}/sshd_config
"""


def lacking() -> str:
    """Why machines cannot be made here, empty if they can."""
    search = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [program for program in PROGRAMS if shutil.which(program, path=search) is None]
    if sys.platform != "linux" or os.geteuid() != 0:
        return "it needs root on Linux, for network namespaces"
    if missing:
        return f"{', '.join(missing)} not found; on Debian: apt-get install iproute2 openssh-client openssh-server procps rsync"
    trial = "ip netns add gcetrial && ip netns del gcetrial && ip link add gcetrial type bridge && ip link del gcetrial"
    tried = subprocess.run(f"unshare --pid --mount --fork true && {trial}", shell=True, capture_output=True, text=True)
    return f"namespaces and bridges cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


class Network:
    """A bridge with a /24 of its own, which machines are put on."""

    def __init__(self, number: int) -> None:
        self.prefix, self.bridge = f"10.77.{number}", f"gcebox{number}"
        self.gateway = f"{self.prefix}.1"
        self._hosts = iter(range(10, 250))
        run(f"ip link add {self.bridge} type bridge && ip addr add {self.gateway}/24 dev {self.bridge}")
        run(f"ip link set {self.bridge} up")

    def next_address(self) -> str:
        return f"{self.prefix}.{next(self._hosts)}"

    def close(self) -> None:
        run(f"ip link del {self.bridge}")


class Machine:
    """One machine.

    Args:
        network: that it is on.
        address: its own.
        folder: for its private files.
        keys: who may log in, as lines of an authorized_keys file.
        environment: what its programs find set.
    """

    def __init__(self, network: Network, address: str, folder: Path, keys: str, environment: dict[str, str]) -> None:
        self.address, self._folder = address, folder
        self._space = f"gce{uuid4().hex[:8]}"
        self._cable = f"gv{address.rpartition('.')[2]}x{network.bridge[6:]}"
        self._lock = threading.Lock()
        self._write_files(keys, environment)
        inner = f"{self._cable}i"
        run(
            f"ip netns add {self._space} && ip link add {self._cable} type veth peer name {inner}"
            f" && ip link set {self._cable} master {network.bridge} up && ip link set {inner} netns {self._space}"
            f" && ip -n {self._space} addr add {address}/24 dev {inner} && ip -n {self._space} link set {inner} up"
            f" && ip -n {self._space} link set lo up && ip -n {self._space} route add default via {network.gateway}"
        )
        script = INIT.format(folder=folder, sshd=shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin"))
        command = ["ip", "netns", "exec", self._space, "unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        with (folder / "log").open("wb") as log:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [*command, "sh", "-c", script], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def shut_down(self) -> None:
        """As the button of a real machine does: services are asked to end; what still runs after a while is ended with it."""
        self._inside("kill -TERM $(cat /run/services/*)")
        end_s = time.monotonic() + SHUTDOWN_S
        while time.monotonic() < end_s and self._inside("kill -0 $(cat /run/services/*)"):
            time.sleep(0.2)
        self.vanish()

    def vanish(self) -> None:
        """Is gone from one moment to the next: no packet leaves it any more, and nothing in it runs."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        subprocess.run(f"ip link set {self._cable} down", shell=True, check=False)
        process.send_signal(signal.SIGKILL)
        process.wait()
        run(f"ip netns del {self._space}")

    def _inside(self, script: str) -> bool:
        process = self._process
        if process is None:
            return False
        init = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        command = ["nsenter", f"--target={init[0]}", "--pid", "--mount", "sh", "-c", script] if init else ["false"]
        return subprocess.run(command, capture_output=True).returncode == 0

    def _write_files(self, keys: str, environment: dict[str, str]) -> None:
        home = self._folder / "home" / USER
        home.mkdir(parents=True)
        (self._folder / "ray").mkdir()
        Path("/tmp/ray").mkdir(exist_ok=True)
        # Root under the image's name, first in the list: the machine's files belong to root.
        (self._folder / "passwd").write_text(f"{USER}:x:0:0::/home/{USER}:/bin/bash\n{Path('/etc/passwd').read_text()}")
        (home / ".bashrc").touch()
        (home / ".profile").write_text(f"export PATH={IMAGE}:{Path(sys.executable).parent}:$PATH\n")
        authorized = self._folder / "authorized_keys"
        authorized.write_text(keys)
        authorized.chmod(0o600)
        run(f"ssh-keygen -q -t ed25519 -N '' -f {self._folder}/host_key")
        variables = " ".join(f"{name}={value}" for name, value in environment.items())
        (self._folder / "sshd_config").write_text(
            f"ListenAddress {self.address}\nHostKey {self._folder}/host_key\nAuthorizedKeysFile {authorized}\nStrictModes no\n"
            f"PermitRootLogin yes\nUsePAM no\nPidFile none\nMaxStartups 100\nSetEnv {variables}\nSubsystem sftp internal-sftp\n"
        )


def run(command: str) -> None:
    """Runs a shell command that must succeed."""
    done: Any = subprocess.run(command, shell=True, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr}")
