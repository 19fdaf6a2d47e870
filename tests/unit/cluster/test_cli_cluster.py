"""`raytrain cluster check` and `raytrain check --cluster`."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_app.cli import main


@pytest.fixture
def cluster_file(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shipped file for a project of one's own, seen from the folder it is meant to be used in."""
    monkeypatch.chdir(repository)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    path = tmp_path / "cluster.yaml"
    path.write_text((repository / "cluster.yaml").read_text().replace("my-project ", "demo-project "))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, printed.out, printed.err


def test_a_good_file_is_summed_up(cluster_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "cluster", "check", str(cluster_file))
    assert (code, err) == (0, "")
    assert "gpu_t4     n1-standard-8  8 CPU, 1 GPU" in out
    assert "Prices are estimates: Google's list prices of 20" in out
    assert "roles/iam.roleViewer" in out
    assert "--no-config-cache" in out


def test_all_problems_are_listed(cluster_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster_file.write_text(
        cluster_file.read_text().replace("max_workers: 10 ", "min_workers: 4 ").replace("{CPU: 4}", "{CPU: 6}")
    )
    code, out, err = run(capsys, "cluster", "check", str(cluster_file))
    assert code == 2
    assert "2 problems\n  min_workers (line " in err
    assert "available_node_types.cpu.resources.CPU (line " in err
    assert "advice: max_workers: is missing" in out


def test_what_an_anchor_spreads_is_said_once(cluster_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster_file.write_text(cluster_file.read_text().replace("onHostMaintenance: TERMINATE", "onHostMaintenance: STOP"))
    code, _, err = run(capsys, "cluster", "check", str(cluster_file))
    assert code == 2
    assert "1 problem\n  available_node_types.cpu.node_config.scheduling.onHostMaintenance (line " in err
    assert "(also: gpu_t4, gpu_l4, gpu_a100)" in err


def test_a_job_against_a_cluster(repository: Path, cluster_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = str(repository / "examples" / "mnist_torch.yaml")
    code, out, _ = run(capsys, "check", job, "--cluster", str(cluster_file), "--set", "storage=gs://bucket/runs")
    assert code == 0
    assert "1 worker     head and 1 cpu, $0.33 an hour on demand, $0.15 to $0.21 as spot machines" in out
    code, _, err = run(capsys, "check", job, "--cluster", str(cluster_file), "--set", "scaling.resources_per_worker.CPU=64")
    assert code == 2
    assert "2 problems" in err
    assert "no node type" in err
    assert "a folder of its own on every machine" in err
