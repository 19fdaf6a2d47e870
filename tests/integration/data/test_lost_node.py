"""Blocks that are lost with a node are read again, also when workers hold every CPU that is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import logging
import numpy as np, ray
from moto.server import ThreadedMotoServer
from pyarrow import fs
from ray.cluster_utils import Cluster
from raytrain_app.data import Reader, load
from tests.integration.data.test_load import make_job
from tests.unit.data.making import DIGITS, images, labels

logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
host, port = server.get_host_and_port()
options = f"?endpoint_override={host}:{port}&scheme=http&region=us-east-1"
bucket = fs.FileSystem.from_uri(f"s3://key:secret@digits{options}&allow_bucket_creation=true")[0]
bucket.create_dir("digits")
for part in range(6):
    with bucket.open_output_stream(f"digits/{part}.npz") as out:
        np.savez(out, x=images(10_000, seed=part), y=labels(10_000))

store = {"object_store_memory": 100_000_000}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **store})
nodes = [cluster.add_node(num_cpus=1, **store) for _ in range(2)]
cluster.wait_for_nodes()
ray.init(cluster.address, log_to_driver=False)
blocks = load(make_job(f"s3://key:secret@digits/{options}"), DIGITS).train.blocks
places = {node for found in ray.experimental.get_object_locations(list(blocks.refs)).values() for node in found["node_ids"]}
lost = [node for node in nodes if node.node_id in places]
print("blocks", len(blocks.refs), "on workers' nodes", len(lost))

@ray.remote(num_cpus=1, resources={"new": 1})
class Holder:
    def ready(self): return True

cluster.add_node(num_cpus=1, resources={"new": 1}, **store)
for node in nodes:
    cluster.remove_node(node, allow_graceful=False)
holder = Holder.remote()
ray.get(holder.ready.remote())
x, y = Reader(blocks).rows(np.arange(blocks.num_rows))
assert (x == np.concatenate([images(10_000, seed=part) for part in range(6)])).all()
ray.shutdown()
cluster.shutdown()
server.stop()
print("read again")
"""


@pytest.mark.slow
def test_blocks_lost_with_their_node_are_read_again(repository: Path) -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=repository, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines()[-1] == "read again"
    assert "on workers' nodes 0" not in run.stdout
