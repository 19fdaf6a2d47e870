"""How fast rows reach a model: the product's reader, stock Ray Data, and a tensor in memory, in one worker in one run.

The model is softmax regression, the smallest there is, so that reading counts for as much as it ever can.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from raytrain_app.data import Reader, Split, epoch_order, load
from raytrain_app.data.convert import convert
from raytrain_app.job import Job
from raytrain_app.task import Task

if TYPE_CHECKING:
    import torch

    Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Ingest:
    """What was measured. Rates are images a second, medians of all rounds; each ratio is the median of the rounds' ratios.

    Attributes:
        rows: images of an epoch.
        open_s: seconds from the files to the first batch, with Ray up.
        memory: a tensor in the worker's memory, indexed by a permutation.
        reader: the product's reader, in the product's order.
        stock: Ray Data's `iter_batches` over a Parquet file of the same rows.
        reader_to_memory: of a round's rates.
        reader_to_stock: of a round's rates.
    """

    rows: int
    open_s: float
    memory: float
    reader: float
    stock: float
    reader_to_memory: float
    reader_to_stock: float

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"opening {self.rows:,} rows to the first batch  {self.open_s:.2f} s",
            f"tensor in memory    {self.memory:>12,.0f} images/s",
            f"product's reader    {self.reader:>12,.0f} images/s   {self.reader_to_memory:.2f} of the tensor in memory",
            f"stock Ray Data      {self.stock:>12,.0f} images/s   the reader is {self.reader_to_stock:.1f} times as fast",
        ]


def measure_ingest(job: Job, task: Task, rounds: int = 5) -> Ingest:
    """Measures one epoch of each kind a round, in turn, in a Ray Train worker. Ray must be up with at least two CPUs.

    Args:
        job: its data, batch size, seed and threads are used.
        task: what the rows are.
        rounds: how often, after one more round that warms up and does not count.
    """
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    began = time.perf_counter()
    dataset = load(job, task)
    Reader(dataset.train.blocks).rows(
        epoch_order(dataset.train, job.train.seed, 0, job.data.order)[: job.train.global_batch_size]
    )
    open_s = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        parquet, results = Path(folder) / "rows.parquet", Path(folder) / "rates.npy"
        convert(job.data, task, parquet)
        config = {
            "split": dataset.train,
            "classes": task.columns.num_classes,
            "batch": job.train.global_batch_size,
            "seed": job.train.seed,
            "order": job.data.order,
            "threads": job.train.threads,
            "rounds": 1 + rounds,
            "results": str(results),
        }
        stock = ray.data.read_parquet(str(parquet)).filter(expr=ray.data.expressions.col("split") == "train")
        TorchTrainer(
            _measure,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
            datasets={"train": stock.drop_columns(["split"])},
            run_config=RunConfig(storage_path=folder),
        ).fit()
        memory, reader, iterated = np.load(results)[1:].T
    return Ingest(
        rows=len(dataset.train),
        open_s=open_s,
        memory=median(memory),
        reader=median(reader),
        stock=median(iterated),
        reader_to_memory=median(reader / memory),
        reader_to_stock=median(reader / iterated),
    )


def _measure(config: dict[str, Any]) -> None:
    """Runs in the worker: writes the rates of each round, (rounds, 3)."""
    import torch

    torch.set_num_threads(config["threads"])
    split, batch, seed = config["split"], config["batch"], config["seed"]
    reader = Reader(split.blocks)
    x, y = (torch.from_numpy(values) for values in reader.rows(split.ids))
    kinds: list[Callable[[int], Batches]] = [
        lambda epoch: _from_memory(x, y, batch, seed + epoch),
        lambda epoch: _from_reader(reader, split, batch, seed, epoch, config["order"]),
        lambda epoch: _from_ray_data(batch),
    ]
    rates = [[_rate(kind, epoch, x[0].numel(), config["classes"]) for kind in kinds] for epoch in range(config["rounds"])]
    np.save(config["results"], rates)


def _rate(batches: Callable[[int], Batches], epoch: int, features: int, classes: int) -> float:
    """Images a second of one epoch of training, with reading."""
    import torch

    model = torch.nn.Linear(features, classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows, began = 0, time.perf_counter()
    for x, y in batches(epoch):
        loss = torch.nn.functional.cross_entropy(model(x.flatten(1).float().div(255)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows += len(y)
    return rows / (time.perf_counter() - began)


def _from_memory(x: torch.Tensor, y: torch.Tensor, batch: int, seed: int) -> Batches:
    import torch

    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    for ids in order.split(batch):
        yield x[ids], y[ids]


def _from_reader(reader: Reader, split: Split, batch: int, seed: int, epoch: int, mode: str) -> Batches:
    import torch

    order = epoch_order(split, seed, epoch, mode)
    for first in range(0, len(order), batch):
        x, y = reader.rows(order[first : first + batch])
        reader.prefetch(order[first + batch : first + 2 * batch])
        yield torch.from_numpy(x), torch.from_numpy(y)


def _from_ray_data(batch: int) -> Batches:
    import ray.train
    import torch

    for columns in ray.train.get_dataset_shard("train").iter_batches(batch_size=batch, batch_format="numpy", prefetch_batches=2):
        yield torch.from_numpy(np.stack(columns["image"])), torch.from_numpy(columns["label"])
