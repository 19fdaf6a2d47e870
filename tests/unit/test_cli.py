"""The command line as a user meets it: in a process of its own, judged by output and exit code."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import raytrain_app
from raytrain_app import cli
from raytrain_app.errors import ClusterError, DataError, Interrupted, JobError, StorageError, TrainingError
from tests.unit.report.making import START_S, make_run, result, status


def raytrain(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "raytrain_app", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


Here = Callable[..., tuple[int, str, str]]


@pytest.fixture
def raytrain_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """As `raytrain`, but in this process, which has imported already what takes seconds; gives exit code, output, errors."""

    def call(*arguments: str, folder: Path) -> tuple[int, str, str]:
        monkeypatch.chdir(folder)
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        code = end.value.code
        assert isinstance(code, int)
        return code, *capsys.readouterr()

    return call


def write_job(folder: Path, **changes: str) -> None:
    keys = {"name": "t", "task": "synthetic", "model": "{name: linear}", "storage": "runs", **changes}
    (folder / "job.yaml").write_text("".join(f"{key}: {value}\n" for key, value in keys.items()))


def test_version() -> None:
    done = raytrain("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"raytrain {raytrain_app.__version__}\n", "")


def commands() -> list[str]:
    """All commands of the program, those of groups with the group's name."""
    group: Any = typer.main.get_command(cli.app)
    return [
        f"{name} {inner}" if inner else name
        for name, command in group.commands.items()
        for inner in getattr(command, "commands", [""])
    ]


@pytest.mark.parametrize("command", commands())
def test_help_has_an_example(command: str) -> None:
    done = CliRunner().invoke(cli.app, [*command.split(), "--help"], env={"NO_COLOR": "1", "COLUMNS": "200"})
    assert done.exit_code == 0
    assert f"Example: raytrain {command}" in done.output


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("raytrain st", ["status", "stop"]),
        ("raytrain status di", ["digits"]),
        ("raytrain export digits --to s", ["safetensors", "saved_model"]),
        ("raytrain evaluate digits --checkpoint ", ["latest", "best"]),
        ("raytrain data fetch f", ["fashion-mnist"]),
    ],
)
def test_the_shell_completes(line: str, offered: list[str], tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "digits", 5)
    words = line.split(" ")
    asked = {"_RAYTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    program = str(Path(sys.executable).with_name("raytrain"))
    done = subprocess.run(program, cwd=tmp_path, env={**os.environ, **asked}, stdout=subprocess.PIPE, text=True, timeout=60)
    assert sorted(done.stdout.split()) == sorted(offered)


def test_without_a_name_the_newest_run_is_meant(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "older", 5, now=status(time=START_S + 15))
    make_run(tmp_path / "runs" / "newer", 5, now=status(time=START_S + 16))
    assert json.loads(raytrain("status", "--json", folder=tmp_path).stdout)["name"] == "newer"
    done = raytrain("status", "oldr", folder=tmp_path)
    assert done.returncode == 2
    assert "did you mean older?" in done.stderr
    done = raytrain("status", folder=tmp_path / "runs" / "older")
    assert done.returncode == 2
    assert "there are no runs in" in done.stderr


def test_help_is_light() -> None:
    script = (
        "import sys\n"
        "from raytrain_app.cli import main\n"
        "try:\n"
        "    main(['run', '--help'])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        "heavy = {'ray', 'torch', 'tensorflow', 'numpy', 'pandas', 'pyarrow'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_runs_are_listed_compared_and_drawn_over_each_other(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a", 20, ended=result(20))
    make_run(tmp_path / "runs" / "b", 20, ended=result(20, test_accuracy=0.97), optimizer={"name": "sgd"})
    (tmp_path / "runs" / "damaged").mkdir()
    (tmp_path / "runs" / "damaged" / "job.yaml").write_text("name: [")
    listed = raytrain("list", folder=tmp_path)
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["run", "a", "b"]
    assert "runs/damaged" in listed.stderr
    compared = json.loads(raytrain("compare", "a", "b", "--json", folder=tmp_path).stdout)
    assert compared["differences"]["optimizer.name"] == ["adam", "sgd"]
    drawn = raytrain("report", "a", "b", folder=tmp_path)
    assert drawn.stdout.strip() == str(tmp_path / "comparison" / "report.html")
    assert "The most accurate on test rows is b with 97.00 %" in (tmp_path / "comparison" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "JOB"),
        (["run", "job.yaml", "--st", "a=b"], "--st"),
        (["trian", "job.yaml"], "trian"),
        (["run", "missing.yaml"], "missing.yaml"),
        (["check", "missing.yaml"], "missing.yaml"),
        (["init", "--framework", "jax"], "jax"),
    ],
)
def test_wrong_command_lines_end_with_2_on_stderr(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = raytrain(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_check_prints_the_plan(tmp_path: Path, raytrain_here: Here) -> None:
    write_job(tmp_path, train="{epochs: 2, global_batch_size: 64}", scaling="{workers: 2..4}")
    code, out, err = raytrain_here(
        "check", "job.yaml", "--set", "model={name: mlp, hidden: 8}", "--name", "other", folder=tmp_path
    )
    assert (code, err) == (0, "")
    plan = {label.rstrip(): text for label, text in (line.split("  ", 1) for line in out.splitlines())}
    plan = {label: text.strip() for label, text in plan.items()}
    assert plan["run"] == "other"
    assert plan["model"] == "mlp, hidden 8, dropout 0.0, batch_norm False"
    assert plan["rows"] == "900 for training, 100 for validation, 250 for the test"
    assert plan["steps"] == "global batch 64, 2 epochs of 15 steps, 30 in all"
    assert plan["workers"] == "2..4, each with 1 CPU"
    assert plan["cluster"].startswith("needs 2 CPU, uses up to 4 CPU")
    assert plan["storage"].endswith("runs/other")
    assert not (tmp_path / "runs").exists()


def test_check_reports_all_problems_of_the_file_at_once(tmp_path: Path, raytrain_here: Here) -> None:
    write_job(tmp_path, train="{epoch: 2, global_batch_size: none}")
    code, out, err = raytrain_here("check", "job.yaml", "--set", "optimizer.lr=-1", folder=tmp_path)
    assert code == 2
    assert out == ""
    for key in ("train.epoch", "train.global_batch_size", "optimizer.lr"):
        assert key in err


def test_check_reports_all_problems_beyond_the_file_at_once(tmp_path: Path, raytrain_here: Here) -> None:
    (tmp_path / "file").write_text("")
    write_job(tmp_path, task="mnist", model="{name: mlp, hiden: 8, dropout: 2}", data="{source: nowhere}", storage="file")
    code, _, err = raytrain_here("check", "job.yaml", folder=tmp_path)
    assert code == 2
    assert "model.hiden: unknown option; mlp takes hidden, dropout; did you mean hidden?" in err
    assert "model.dropout: found 2; input should be less than 1" in err
    assert "nowhere" in err
    assert f"{tmp_path}/file" in err


def test_a_run_cannot_have_no_parameter_server(tmp_path: Path, raytrain_here: Here) -> None:
    code, _, err = raytrain_here("scale", "runs/any", "--servers", "0", folder=tmp_path)
    assert (code, err.strip()) == (2, "--servers: found 0; expected 1 or more")


def test_check_prints_memory_in_its_units(tmp_path: Path, raytrain_here: Here) -> None:
    write_job(tmp_path)
    _, out, _ = raytrain_here("check", "job.yaml", "--set", "scaling.resources_per_worker.memory=1073741824", folder=tmp_path)
    assert "1 GiB memory" in out


def test_unknown_model_names_the_nearest(tmp_path: Path, raytrain_here: Here) -> None:
    write_job(tmp_path, model="{name: liner}")
    code, _, err = raytrain_here("check", "job.yaml", folder=tmp_path)
    assert code == 2
    assert "model.name: found liner; expected linear, mlp; did you mean linear?" in err


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_init_writes_a_project_that_checks(framework: str, tmp_path: Path) -> None:
    done = raytrain("init", "my project", "--framework", framework, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cd 'my project'" in done.stdout
    done = raytrain("check", "job.yaml", folder=tmp_path / "my project")
    if framework == "tensorflow" and importlib.util.find_spec("tensorflow") is None:
        assert "framework: tensorflow needs tensorflow" in done.stderr
        assert "pip install 'raytrain-app[tensorflow]'" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (0, "")
        assert framework in done.stdout


def test_init_overwrites_nothing(tmp_path: Path, raytrain_here: Here) -> None:
    (tmp_path / "task.py").write_text("mine")
    code, _, err = raytrain_here("init", folder=tmp_path)
    assert code == 2
    assert "task.py" in err
    assert (tmp_path / "task.py").read_text() == "mine"
    assert not (tmp_path / "job.yaml").exists()


def test_init_into_a_file_is_explained(tmp_path: Path, raytrain_here: Here) -> None:
    (tmp_path / "taken").write_text("")
    code, _, err = raytrain_here("init", "taken/project", folder=tmp_path)
    assert code == 2
    assert "taken/project" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("example", ["mnist_torch", "mnist_ddp", "custom_task"])
def test_examples_check(example: str, repository: Path, raytrain_here: Here) -> None:
    code, _, err = raytrain_here("check", f"{example}.yaml", folder=repository / "examples")
    assert (code, err) == (0, "")


ENDINGS = [
    (JobError("lr: found -1"), 2, "lr: found -1\n"),
    (DataError("a.csv, line 3"), 2, "a.csv, line 3\n"),
    (StorageError("runs/x is taken"), 2, "runs/x is taken\n"),
    (ClusterError("need 4 CPU"), 3, "need 4 CPU\n"),
    (TrainingError("loss is NaN"), 4, "loss is NaN\n"),
    (TrainingError("your code raised", "Traceback:\n  boom\n"), 4, "Traceback:\n  boom\nyour code raised\n"),
    (Interrupted("stopped at step 7"), 130, "stopped at step 7\n"),
    (KeyboardInterrupt(), 130, ""),
    (KeyError("x"), 4, "Unexpected KeyError: 'x'; run again with --debug for the traceback\n"),
    (ValueError("two\n lines"), 4, "Unexpected ValueError: two lines; run again with --debug for the traceback\n"),
]


@pytest.mark.parametrize(("error", "code", "said"), ENDINGS, ids=lambda value: type(value).__name__)
def test_every_error_ends_as_a_sentence_and_a_code(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(arguments: list[str]) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "job.yaml"])
    assert end.value.code == code
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize("error", [KeyError("x"), JobError("wrong")])
def test_debug_shows_the_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(arguments: list[str]) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit):
        cli.main(["run", "job.yaml", "--debug"])
    printed = capsys.readouterr().err
    assert "Traceback (most recent call last)" in printed
    assert "in fails" in printed
