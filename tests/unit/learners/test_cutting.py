"""Cutting models: stages of equal size, what cannot be cut, and the memory that a cut takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raytrain_app.cli.plan import plan_lines
from raytrain_app.job import Job, ModelParallel, job_from_dict
from raytrain_app.learners.costs import row_flops, stage_plan
from raytrain_app.learners.cutting import _keep, cut_problems, divided, stages
from raytrain_app.learners.footprint import cutting_problems, footprint
from raytrain_app.task import Columns, Cut, ModelOptions, Task
from raytrain_app.tasks.mnist import TASK as MNIST
from raytrain_app.tasks.tiny_gpt import TASK, Gpt


def gpt(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return TASK.torch_model("gpt", Gpt(**{"layers": 4, "width": 32, "heads": 4, "dropout": 0.0, **options}))


def gpt_cut(heads: int = 4) -> Cut:
    return TASK.torch_cut("gpt", Gpt(layers=4, width=32, heads=heads, dropout=0.0))


class Words(Task):
    columns = Columns(shape=(4,), dtype="int64", num_classes=2)
    models = {"words": ModelOptions}

    def torch_model(self, name: str, options: Any) -> nn.Module:
        model = nn.Module()
        model.embedding = nn.Embedding(1000, 8)
        model.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 16)])
        return model

    def torch_cut(self, name: str, options: Any) -> Cut:
        return Cut(chain=("embedding", "layers"))


WORDS = Words()


def make_job(task: str = "tiny_gpt", model: dict[str, Any] | None = None, workers: int = 2, **ways: Any) -> Job:
    return job_from_dict(
        {
            "name": "cut",
            "task": task,
            "model": model or {"name": "gpt", "layers": 4, "width": 32},
            "train": {"global_batch_size": 32, "virtual_shards": 2},
            "strategy": {"name": "model_parallel", **ways},
            "scaling": {"workers": workers},
        }
    )


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.data())
def test_no_other_cut_into_stages_has_a_smaller_largest_one(costs: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(costs)))
    chain = [str(number) for number in range(len(costs))]
    found = stages(chain, costs, count)
    assert [name for stage in found for name in stage] == chain
    assert len(found) == count
    assert all(found)

    def least(first: int, parts: int) -> int:
        if parts == 1:
            return sum(costs[first:])
        ends = range(first + 1, len(costs) - parts + 2)
        return min(max(sum(costs[first:end]), least(end, parts - 1)) for end in ends)

    largest = max(sum(costs[int(name)] for name in stage) for stage in found)
    assert largest == least(0, count)


@pytest.mark.parametrize("interleaved", [False, True])
def test_stages_one_after_the_other_are_the_model(interleaved: bool) -> None:
    ways: dict[str, Any] = {"pipeline": 2 if interleaved else 3, "microbatches": 4}
    if interleaved:
        ways |= {"schedule": "interleaved", "stages_per_worker": 2}
    plan = stage_plan(make_job(workers=ways["pipeline"], **ways), TASK)
    assert len(plan) == 4 if interleaved else 3
    tokens = torch.randint(0, 31, (2, 64))
    with torch.no_grad():
        expected = gpt()(tokens)
        hidden, names = tokens, set()
        for part in plan:
            model = gpt()
            _keep(model, part)
            hidden = nn.Sequential(*map(model.get_submodule, part))(hidden)
            names |= {name for name, _ in model.named_parameters()}
    assert torch.equal(hidden, expected)
    assert names == {name for name, _ in gpt().named_parameters()}


def test_stages_can_be_equal_in_what_they_compute() -> None:
    """An embedding has parameters and takes no multiplication."""
    counted = stage_plan(make_job("tests.unit.learners.test_cutting:WORDS", {"name": "words"}, pipeline=2, microbatches=2), WORDS)
    assert counted == [["embedding"], ["layers.0", "layers.1", "layers.2"]]
    by_flops = make_job("tests.unit.learners.test_cutting:WORDS", {"name": "words"}, pipeline=2, microbatches=2, balance="flops")
    assert stage_plan(by_flops, WORDS) == [["embedding", "layers.0", "layers.1"], ["layers.2"]]


class Odd(Words):
    """Its model looks at the values of what it is given."""

    def torch_inputs(self, x: torch.Tensor) -> torch.Tensor:
        return x % max(1, int(x.max()))


def test_models_that_cannot_be_counted_are_refused_where_they_must_be(tmp_path: Path) -> None:
    ways: dict[str, Any] = {"pipeline": 2, "microbatches": 2}
    name, model = "tests.unit.learners.test_cutting:ODD", {"name": "words"}
    problem = cutting_problems(make_job(name, model, **ways, balance="flops"), Odd())
    assert len(problem) == 1
    assert problem[0].startswith("strategy.balance: found flops, but none can be counted without values (")
    job = make_job(name, model, **ways)
    assert cutting_problems(job, Odd()) == []
    text = "\n".join(plan_lines(job.model_copy(update={"storage": str(tmp_path)}), Odd()))
    assert re.search("memory +cannot be told before the model computes", text)


def test_the_operations_of_a_row_are_those_of_its_matrix_products() -> None:
    """Forward and twice that backward, of two operations for each parameter and token, and of attention."""
    job = make_job("tiny_gpt", {"name": "gpt", "layers": 4, "width": 32, "heads": 4}, fsdp=2)
    matrices = sum(p.numel() for name, p in gpt().named_parameters() if p.dim() == 2 and name != "embedding.weight")
    assert row_flops(job, TASK) == 3 * 64 * (2 * matrices + 4 * 4 * 64 * 32)


@pytest.mark.parametrize(
    ("model", "ways", "expected"),
    [
        ({"layers": 2, "width": 48, "heads": 4}, {"tensor": 3}, "strategy.tensor: found 3; expected a divisor of 4"),
        (
            {"layers": 2},
            {"pipeline": 6, "microbatches": 6},
            "strategy.pipeline: found 6, but the task's torch_cut has a chain of 5",
        ),
        (
            {"layers": 2},
            {"pipeline": 2, "microbatches": 2, "schedule": "interleaved", "stages_per_worker": 3},
            "strategy.pipeline: found 2 x 3, but the task's torch_cut has a chain of 5",
        ),
    ],
)
def test_cuts_that_do_not_fit_are_refused(model: dict[str, Any], ways: dict[str, Any], expected: str) -> None:
    workers = ways.get("tensor", 1) * ways.get("pipeline", 1)
    problems = cutting_problems(make_job(model={"name": "gpt", **model}, workers=workers, **ways), TASK)
    assert len(problems) == 1
    assert problems[0].startswith(expected)


def test_a_model_without_a_plan_is_cut_by_fsdp_alone() -> None:
    mlp = {"name": "mlp"}
    assert cutting_problems(make_job("mnist", mlp, fsdp=2), MNIST) == []
    assert "names no columns; expected 1, or fsdp instead" in cutting_problems(make_job("mnist", mlp, tensor=2), MNIST)[0]
    pipeline = make_job("mnist", mlp, pipeline=2, microbatches=2)
    assert "names no chain of modules; expected fewer, or fsdp instead" in cutting_problems(pipeline, MNIST)[0]


def test_batch_norm_is_refused_with_what_to_use_instead() -> None:
    job = make_job("mnist", {"name": "cnn", "batch_norm": True}, fsdp=2)
    assert "LayerNorm or GroupNorm instead of BatchNorm" in cutting_problems(job, MNIST)[0]


def test_patterns_name_the_layers_that_are_divided() -> None:
    found = divided(gpt(), gpt_cut())
    assert {name for name in found if name.startswith("blocks.2.")} == {
        f"blocks.2.{name}.weight"
        for name in ("attention.query", "attention.key", "attention.value", "attention.out", "gate", "up", "down")
    }
    assert not any(name.startswith(("embedding", "head")) for name in found)
    assert not list(cut_problems(gpt(), gpt_cut(), ModelParallel(name="model_parallel", tensor=2)))


def test_memory_goes_down_with_each_way_to_cut() -> None:
    whole = sum(parameter.nbytes for parameter in gpt().parameters())
    halves = footprint(make_job(fsdp=2), TASK)
    assert whole / 2 <= halves.parameters <= whole / 2 * 1.1
    assert halves.optimizer == 2 * halves.parameters
    tensor = footprint(make_job(tensor=2), TASK)
    assert whole / 2 < tensor.parameters < 0.6 * whole
    assert tensor.activations == pytest.approx(2 * halves.activations, rel=0.01)
    pipeline = footprint(make_job(pipeline=2, microbatches=4), TASK)
    assert pipeline.parameters < 0.6 * whole
    turns = footprint(make_job(pipeline=2, microbatches=4, schedule="interleaved", stages_per_worker=2), TASK)
    assert turns.parameters < 0.6 * whole
    assert turns.activations > pipeline.activations  # more stages have microbatches under way
    again = footprint(make_job(fsdp=2, activation_checkpointing=True), TASK)
    assert again.activations < halves.activations / 3


def test_the_plan_tells_stages_and_memory_and_warns_when_it_will_not_fit(tmp_path: Path) -> None:
    ways: dict[str, Any] = {"pipeline": 2, "microbatches": 4, "schedule": "interleaved", "stages_per_worker": 2}
    need = footprint(make_job(**ways), TASK).total
    for memory, fits in ((need, True), (need - 1, False)):
        scaling = {"workers": 2, "resources_per_worker": {"memory": memory}}
        job = job_from_dict({**make_job(**ways).model_dump(mode="json"), "scaling": scaling, "storage": str(tmp_path)})
        text = "\n".join(plan_lines(job, TASK))
        assert "embedding to blocks.0, blocks.1, blocks.2, blocks.3 to head; in turn on 2 workers" in text
        assert re.search("memory +up to [0-9.]+ MiB a worker: parameters [0-9.]+ KiB", text)
        assert ("so the model will not fit; cut it further" not in text) == fits
