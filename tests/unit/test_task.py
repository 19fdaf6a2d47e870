"""Finding tasks by name, and the number of classes that a job asks of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch

from raytrain_app.errors import JobError
from raytrain_app.task import load_task


@pytest.mark.parametrize("model", ["linear", "mlp", "cnn"])
def test_models_have_an_output_for_each_class_of_the_job(model: str) -> None:
    letters = load_task("mnist", 26)
    options = letters.models[model]()
    x = np.zeros((2, 28, 28), np.uint8)
    module = letters.torch_model(model, options)
    assert module(letters.torch_inputs(torch.from_numpy(x))).shape == (2, 26)
    network: Any = letters.keras_model(keras, model, options)
    assert network.output_shape == (None, 26)


def test_classes_of_one_job_do_not_change_the_task_of_another() -> None:
    assert load_task("mnist", 26).columns.num_classes == 26
    assert load_task("mnist").columns.num_classes == 10
    assert load_task("mnist", 10) is load_task("mnist")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mnits", "did you mean mnist?"),
        ("no_such_module:TASK", "module 'no_such_module' was not found"),
        ("raytrain_app.tasks.mnist:Nothing", "has nothing under the name 'Nothing'"),
        ("raytrain_app.tasks.mnist:Mnist", "expected an instance of raytrain_app.task.Task"),
    ],
)
def test_a_name_that_is_no_task_is_refused_with_what_to_do(name: str, expected: str) -> None:
    with pytest.raises(JobError) as caught:
        load_task(name)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("class Mine(:", "SyntaxError: invalid syntax"),
        ("x = Feld(3)", "NameError: name 'Feld' is not defined"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
def test_an_error_in_the_tasks_module_is_named_with_its_line(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_task.py").write_text(f"import os\n\n{line}\n")
    with pytest.raises(JobError) as caught:
        load_task("broken_task:TASK")
    assert str(caught.value).startswith(f"task: {tmp_path}/broken_task.py, line 3: {said}")
