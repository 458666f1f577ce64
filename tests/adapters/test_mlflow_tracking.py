"""A stage's MLflow run: what it holds, how it ends, how it goes on after a kill, and what a failing store costs."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipeline.adapters import mlflow_tracking
from pipeline.adapters.mlflow_store import RunStore, resolve_tracking_uri
from pipeline.adapters.mlflow_tracking import RUN_ID_FILE, TrackingConfig, Untracked, stage_run
from pipeline.core.errors import PipelineError

ROOT = Path(__file__).resolve().parents[2]
TRACKING = TrackingConfig(tracking_uri=None, experiment_name="tracked", timeout_seconds=10.0)

STAGE = """
import sys, time
from dataclasses import dataclass
from pathlib import Path
from pipeline.adapters import mlflow_store
from pipeline.adapters.mlflow_tracking import TrackingConfig, stage_run
@dataclass
class Config:
    seed: int
root, cache, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
print("imported", flush=True)
sys.stdin.readline()
with stage_run(TrackingConfig(None, "tracked", 10.0), "distill", Config(1), root, cache, True) as tracked:
    for step in (1, 2, 3):
        tracked.log_row({"step": step, "tokens": 10 * step, "loss": 1.0 / step})
        tracked.next_batch = 0.0  # each row at once
    print("tracked", flush=True)
    time.sleep(seconds)
"""


@dataclass
class Distill:
    learning_rate: float = 1e-3
    template: str = ""
    many: dict[str, int] = field(default_factory=dict)


@dataclass
class Config:
    distill: Distill
    seed: int = 0


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """The folder of a project, one for the module: creating its store takes seconds."""
    return tmp_path_factory.mktemp("project")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No store is named, and the working directory, which must stay empty, is not the project's."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # stage_run's own setting, here undone after the test
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield
    assert list(folder.iterdir()) == []


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "0123456789abcdef"


def tracked(root: Path, cache: Path, config: Config | None = None, tracking: TrackingConfig = TRACKING):
    return stage_run(tracking, "distill", config or Config(Distill()), root, cache, main_process=True)


def found(root: Path, run_id: str):
    return RunStore(resolve_tracking_uri(None, root)).client.get_run(run_id)


def curve(root: Path, run_id: str, name: str) -> list[tuple[int, float]]:
    points = RunStore(resolve_tracking_uri(None, root)).client.get_metric_history(run_id, name)
    return sorted((point.step, point.value) for point in points)


def artifact(root: Path, run_id: str, name: str) -> str:
    return Path(RunStore(resolve_tracking_uri(None, root)).client.download_artifacts(run_id, name)).read_text()


def start(root: Path, cache: Path, seconds: float) -> subprocess.Popen:
    command = [sys.executable, "-c", STAGE, str(root), str(cache), str(seconds)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


def stopped_while_tracked(root: Path, cache: Path, number: int) -> tuple[int, str]:
    """Stop a stage with the signal `number` once it is under way; return its exit status and its run."""
    with start(root, cache, seconds=600) as process:
        process.stdin.write("\n")
        process.stdin.flush()
        assert [process.stdout.readline() for _ in range(2)] == ["imported\n", "tracked\n"], process.stderr.read()
        process.send_signal(number)
        return process.wait(), (cache / RUN_ID_FILE).read_text()


def test_a_run_holds_config_curves_and_what_it_took(root, cache):
    with tracked(root, cache) as run:
        run.log_row({"step": 2, "tokens": 100, "loss": 2.0, "learning_rate": 1e-3})
        run.log_row({"step": 2, "tokens": 100, "dev_token_acceptance": 0.25})
        assert curve(root, run.run_id, "loss") == [(2, 2.0)], "the first row is there at once"
        time.sleep(0.05)
        run.log_row({"step": 4, "tokens": 200, "loss": 1.0, "learning_rate": 5e-4})
        assert found(root, run.run_id).info.status == "RUNNING"
        run.wrote({"draft_fingerprint": "abcd"})
    done = found(root, run.run_id)
    assert (done.info.status, done.info.run_name) == ("FINISHED", "distill")
    assert (done.data.tags["stage"], done.data.tags["fingerprint"]) == ("distill", "0123456789abcdef")
    assert (done.data.tags["draft_fingerprint"], done.data.tags["logged"]) == ("abcd", "live")
    assert (done.data.params["distill.learning_rate"], done.data.params["seed"]) == ("0.001", "0")
    assert "learning_rate: 0.001\n" in artifact(root, run.run_id, "config.yaml")
    assert curve(root, run.run_id, "loss") == [(2, 2.0), (4, 1.0)]
    assert curve(root, run.run_id, "by_tokens/loss") == [(100, 2.0), (200, 1.0)]
    assert curve(root, run.run_id, "by_tokens/dev_token_acceptance") == [(100, 0.25)]
    assert curve(root, run.run_id, "learning_rate") == [(2, 1e-3), (4, 5e-4)]
    figures = done.data.metrics
    assert figures["tokens_seen"] == 200
    assert 0 < figures["tokens_per_second"] < 100 / 0.05
    assert 0.05 < figures["wall_seconds"] < 600
    assert figures["peak_memory_bytes"] > 10_000_000


def test_the_commit_is_a_tag(root, cache):
    tracking = TrackingConfig(resolve_tracking_uri(None, root), "tracked", 10.0)
    with stage_run(tracking, "distill", Config(Distill()), ROOT, cache, main_process=True) as run:
        pass
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    assert found(root, run.run_id).data.tags.get("git_commit", "") == head.stdout.strip()


def test_a_changed_param_on_resume_is_shown_beside_the_first(root, cache):
    """R02"""
    first = Config(Distill(template="é" * 10_000, many={f"key{index}": index for index in range(300)}))
    with pytest.raises(RuntimeError), tracked(root, cache, first) as run:
        raise RuntimeError
    assert found(root, run.run_id).info.status == "FAILED"
    second = Config(
        Distill(learning_rate=5e-4, template="é" * 10_000, many={**first.distill.many, "key7": -7, "new": 1})
    )
    with tracked(root, cache, second) as again:
        pass
    done = found(root, run.run_id)
    assert again.run_id == run.run_id and done.info.status == "FINISHED"
    params = done.data.params
    assert (params["distill.learning_rate"], params["attempt_2/distill.learning_rate"]) == ("0.001", "0.0005")
    assert (params["distill.many.key7"], params["attempt_2/distill.many.key7"]) == ("7", "-7")
    assert params["distill.many.new"] == "1" and params["distill.many.key299"] == "299"
    assert len(params["distill.template"]) == 500 and "attempt_2/distill.template" not in params
    assert len(params) == 1 + 1 + 300 + 1 + 3  # the learning rate, the template, the keys, the seed, what is new
    for name, rate in (("config.yaml", "0.001"), ("config.attempt_2.yaml", "0.0005")):
        text = artifact(root, run.run_id, name)
        assert f"learning_rate: {rate}\n" in text and "é" * 10_000 in text and "key299: 299\n" in text


def test_an_interrupt_ends_it_as_killed(root, cache):
    with pytest.raises(KeyboardInterrupt), tracked(root, cache) as run:
        raise KeyboardInterrupt
    assert found(root, run.run_id).info.status == "KILLED"


def test_sigterm_ends_it_as_killed(root, cache):
    status, run_id = stopped_while_tracked(root, cache, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM
    assert found(root, run_id).info.status == "KILLED"
    assert curve(root, run_id, "loss") == [(1, 1.0), (2, 0.5), (3, 1.0 / 3)]


def test_the_handler_of_sigterm_is_put_back(root, cache):
    before = signal.getsignal(signal.SIGTERM)
    with tracked(root, cache):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_killed_run_goes_on(root, cache):
    """The new attempt repeats what came after its checkpoint; the curves show each step once."""
    status, run_id = stopped_while_tracked(root, cache, signal.SIGKILL)
    left = found(root, run_id)
    assert (status, left.info.status) == (-signal.SIGKILL, "RUNNING")
    assert curve(root, run_id, "loss") == [(1, 1.0), (2, 0.5), (3, 1.0 / 3)]
    assert left.data.metrics["wall_seconds"] > 0
    with tracked(root, cache) as run:
        for step in (2, 3, 5, 4):  # 4: what the killed attempt had not sent, from the history at the end
            run.log_row({"step": step, "tokens": 10 * step, "loss": 1.0 / step})
    done = found(root, run_id)
    assert (run.run_id, done.info.status, done.data.tags["attempt"]) == (run_id, "FINISHED", "2")
    assert curve(root, run_id, "loss") == [(1, 1.0), (2, 0.5), (3, 1.0 / 3), (4, 0.25), (5, 0.2)]
    assert curve(root, run_id, "by_tokens/loss")[-2:] == [(40, 0.25), (50, 0.2)]
    assert [step for step, _ in curve(root, run_id, "tokens_seen")] == [1, 2, 3, 4, 5]
    assert done.data.metrics["tokens_seen"] == 50
    assert done.data.metrics["wall_seconds"] > left.data.metrics["wall_seconds"]


def test_the_peak_of_memory_is_that_of_all_attempts(root, cache, monkeypatch):
    for peak in (3e9, 2e9, 4e9):
        monkeypatch.setattr(mlflow_tracking, "_peak_memory", lambda peak=peak: {"peak_memory_bytes": peak})
        with tracked(root, cache) as run:
            run.log_row({"step": 1, "tokens": 10, "loss": 1.0})
        assert found(root, run.run_id).data.metrics["peak_memory_bytes"] == max(3e9, peak)


@pytest.mark.parametrize("lost", ["deleted", "unknown"])
def test_a_run_that_the_store_does_not_know_is_begun_anew(root, cache, lost):
    with tracked(root, cache) as first:
        pass
    if lost == "deleted":
        first.store.client.delete_run(first.run_id)
    else:
        (cache / RUN_ID_FILE).write_text("0" * 32)
    with tracked(root, cache) as second:
        pass
    assert second.run_id not in (first.run_id, "0" * 32)
    assert (cache / RUN_ID_FILE).read_text() == second.run_id
    assert found(root, second.run_id).info.status == "FINISHED"


def test_first_starts_at_the_same_time(tmp_path):
    """No store yet: two stages make it at once, and the experiment in it."""
    project = tmp_path / "project"
    stages = [start(project, tmp_path / name, seconds=0) for name in ("first", "second")]
    assert [stage.stdout.readline() for stage in stages] == ["imported\n"] * 2
    for stage in stages:
        stage.stdin.write("\n")
        stage.stdin.flush()
    for stage in stages:
        _, errors = stage.communicate()
        assert stage.returncode == 0, errors
    runs = [found(project, (tmp_path / name / RUN_ID_FILE).read_text()) for name in ("first", "second")]
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert len({run.info.experiment_id for run in runs}) == 1


def test_an_unreachable_store_ends_the_stage_before_its_work(root, cache, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    began = time.monotonic()
    with pytest.raises(PipelineError, match="cannot be used"), tracked(root, cache):
        pytest.fail("the work began")
    assert time.monotonic() - began < 15
    assert not cache.exists()


def test_only_the_main_process_tracks(tmp_path, cache, monkeypatch):
    """P09: the others do not even look for the store."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    for tracking, main_process in ((TRACKING, False), (None, True)):
        with stage_run(tracking, "distill", Config(Distill()), tmp_path, cache, main_process) as run:
            run.log_row({"step": 1, "tokens": 1, "loss": 1.0})
            run.wrote({"draft_fingerprint": "abcd"})
        assert isinstance(run, Untracked)
    assert not cache.exists()


def test_a_store_that_fails_later_costs_a_warning_and_nothing_else(root, cache, monkeypatch, caplog):
    log_points, end_run = RunStore.log_points, RunStore.end_run

    def refuse(*_):
        raise PipelineError("the server went away.", "bring it back.")

    with caplog.at_level(logging.WARNING), tracked(root, cache) as run:
        monkeypatch.setattr(RunStore, "log_points", refuse)
        run.log_row({"step": 1, "tokens": 10, "loss": 1.0})
        assert "the server went away" in caplog.text
        assert run.next_batch > time.monotonic() + 30, "training does not wait for it at every row"
        monkeypatch.setattr(RunStore, "log_points", log_points)
        run.log_row({"step": 2, "tokens": 20, "loss": 0.5})
    assert curve(root, run.run_id, "loss") == [(1, 1.0), (2, 0.5)]
    monkeypatch.setattr(RunStore, "end_run", refuse)
    with pytest.raises(ZeroDivisionError), tracked(root, cache) as run:
        raise ZeroDivisionError
    end_run(run.store, run.run_id, "FAILED")


def test_rows_are_sent_in_batches(root, cache, monkeypatch):
    sizes = []
    log_points = RunStore.log_points

    def counted(store, run_id, points):
        sizes.append(len(points))
        log_points(store, run_id, points)

    monkeypatch.setattr(RunStore, "log_points", counted)
    monkeypatch.setattr(mlflow_tracking, "SECONDS_BETWEEN_BATCHES", 600.0)
    with tracked(root, cache) as run:
        for step in range(1500):
            run.log_row({"step": step, "tokens": step, "loss": 1.0})
    assert len(sizes) == 2
    assert len(curve(root, run.run_id, "loss")) == 1500
