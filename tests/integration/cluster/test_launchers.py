"""Ray's launcher for schedulers such as Slurm. It ends all of Ray that it sees, so it runs in a process tree of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cluster.conftest import free_ports
from tests.integration.gcp.machines import lacking


@pytest.mark.slow
def test_symmetric_run_and_again(tmp_path: Path) -> None:
    if reason := lacking():
        pytest.skip(f"a process tree of its own cannot be had here: {reason}")
    job = {"name": "allocated", "task": "synthetic", "model": {"name": "linear"}, "storage": str(tmp_path / "runs")}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    (port,) = free_ports(1)
    Path("/tmp/ray").mkdir(exist_ok=True)
    launch = f"ray symmetric-run --address 127.0.0.1:{port} --num-cpus 2 --include-dashboard=false"
    script = f"mount -t tmpfs tmpfs /tmp/ray && {launch} -- raytrain run job.yaml --address auto --resume-if-begun"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "RAY_AUTH_MODE": "disabled"}
    command = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "status               finished" in done.stdout
