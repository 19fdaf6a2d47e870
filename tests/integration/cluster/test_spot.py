"""A notice drains the node it is about: workers there see it coming, and the node ends once they have left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_notice_drains_the_node(repository: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.cluster.drained_by_notice"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    noticed_s = seen.pop("noticed_s")
    assert seen == {"watched": True, "before": [False, False], "draining": True, "left": [], "without_host": []}
    assert noticed_s < 10
