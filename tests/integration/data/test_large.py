"""Data four times as large as the object store, in a Ray of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

STORE_MB = 100
ROWS = 4 * STORE_MB * 1_000_000 // (28 * 28)

PROGRAM = """
import json, sys
import numpy as np, psutil, ray
from raytrain_app.data import Reader, epoch_order, load
from raytrain_app.job import job_from_dict
from tests.integration.data.test_load import Mnist

ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory={store})
data = {{"source": sys.argv[1], "order": "windowed", "window_mib": 32}}
job = job_from_dict({{"name": "large", "task": "mnist", "model": {{"name": "linear"}}, "data": data}})
dataset = load(job, Mnist())
order = epoch_order(dataset.train, 0, 0, "windowed")

@ray.remote(num_cpus=0)
def worker(split, order, rank):
    reader, own = Reader(split.blocks), psutil.Process()
    start, peak, mapped, seen = own.memory_full_info().uss, 0, 0, []
    for step, first in enumerate(range(128 * rank, len(order), 256)):
        ids = order[first : first + 128]
        x, y = reader.rows(ids)
        reader.prefetch(order[first + 256 : first + 384])
        assert (x[:, 0, :4].copy().view("<u4").ravel() == ids).all() and (y == ids % 10).all()
        seen.append(ids)
        mapped = max(mapped, len(reader.mapped))
        if step % 100 == 0:
            peak = max(peak, own.memory_full_info().uss)
    return np.concatenate(seen), peak - start, mapped

ends = ray.get([worker.remote(dataset.train, order, rank) for rank in range(2)])
seen = np.sort(np.concatenate([ids for ids, _, _ in ends]))
exact = bool(np.array_equal(seen, dataset.train.ids))
print(json.dumps({{"exact": exact, "grown": [grown for _, grown, _ in ends], "mapped": [m for _, _, m in ends],
                   "rows": len(dataset.train), "blocks": len(dataset.train.blocks.refs), "window": dataset.train.blocks.window}}))
"""


def write_numbered(folder: Path, rows: int) -> None:
    """28 x 28 images of which the first four bytes are the row's number, and the label is its last digit."""
    head = bytes([0, 0, 8])
    with (folder / "train-images-idx3-ubyte").open("wb") as images:
        images.write(head + b"\3" + np.array([rows, 28, 28], ">u4").tobytes())
        for first in range(0, rows, 10_000):
            ids = np.arange(first, min(first + 10_000, rows), dtype="<u4")
            x = np.zeros((len(ids), 784), np.uint8)
            x[:, :4] = ids.view(np.uint8).reshape(-1, 4)
            images.write(x.tobytes())
    labels = (np.arange(rows) % 10).astype(np.uint8)
    (folder / "train-labels-idx1-ubyte").write_bytes(head + b"\1" + np.array([rows], ">u4").tobytes() + labels.tobytes())


@pytest.mark.slow
def test_every_row_is_read_once_with_bounded_memory(tmp_path: Path, repository: Path) -> None:
    write_numbered(tmp_path, ROWS)
    program = PROGRAM.format(store=STORE_MB * 1_000_000)
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, cwd=repository, timeout=280
    )
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["exact"]
    assert result["rows"] == round(ROWS * 0.9)
    assert result["blocks"] > 90
    assert max(result["mapped"]) == result["window"] == 8
    # A worker's own memory: far below a window, of which it holds no copy.
    assert max(result["grown"]) < 64e6
