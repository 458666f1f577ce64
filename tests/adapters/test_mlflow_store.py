"""MLflow store: where it is, fresh SQLite files, limits of params, unreachable stores."""

from __future__ import annotations

import signal
import socket
import time

import pytest
from fresh_store import fresh_store

from pipeline.adapters.mlflow_store import RunStore, check_store, child_of, resolve_tracking_uri
from pipeline.core.errors import PipelineError


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with fresh_store(RunStore, tmp_path_factory) as (made, root):
        yield made
    assert {path.name for path in root.iterdir()} == {"mlflow.db", "mlflow.db.lock"}


def test_uri_resolution(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert resolve_tracking_uri(None, tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///other/store.db")
    assert resolve_tracking_uri(None, tmp_path) == f"sqlite:///{tmp_path}/other/store.db"
    assert resolve_tracking_uri("sqlite:////elsewhere/a.db", tmp_path) == "sqlite:////elsewhere/a.db"
    assert resolve_tracking_uri("http://server:5000", tmp_path) == "http://server:5000"


def test_long_values_and_many_keys(store):
    """R02"""
    many = {f"key{index}": index for index in range(300)}
    values = {"prepare": {"template": "é" * 10_000, "many": many, "nested": [{"a b(c)": 1}, []]}, "k" * 300: 1}
    with store.run("experiment", "limits", {"tag": "x" * 20_000}) as run_id:
        store.log_params(run_id, values)
        store.log_params(run_id, values)  # a repeated call is no conflict
    run = store.client.get_run(run_id)
    params = run.data.params
    assert run.info.status == "FINISHED"
    assert params["prepare.template"].endswith("... (10000 characters, whole in the run's files)")
    assert len(params["prepare.template"]) == 500
    assert params["prepare.many.key299"] == "299"
    assert params["prepare.nested.0.a b_c_"] == "1"
    assert params["prepare.nested.1"] == "[]"
    assert len(params) == 304


def test_numbers_that_are_not_finite_and_odd_names(store):
    with store.run("experiment", "numbers", {}) as run_id:
        store.log_metrics(run_id, {"speedup": 1.5, "odd@name": 2.0, "absent": float("nan")})
        store.log_points(run_id, [("loss", 1.0, step, 0) for step in range(1500)])
    assert store.client.get_run(run_id).data.metrics == {"speedup": 1.5, "odd_name": 2.0, "loss": 1.0}
    assert len(store.client.get_metric_history(run_id, "loss")) == 1500


def test_a_run_that_raises_is_failed(store):
    with pytest.raises(RuntimeError), store.run("experiment", "broken", {}) as run_id:
        raise RuntimeError
    assert store.client.get_run(run_id).info.status == "FAILED"


def test_a_run_that_is_stopped_is_killed_with_its_parent(store, request):
    """By SIGTERM, which Python would not turn into an exception, and by an interrupt."""
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, interrupt))
    stops = {
        SystemExit: lambda: signal.raise_signal(signal.SIGTERM),
        KeyboardInterrupt: lambda: signal.raise_signal(signal.SIGINT),
    }
    before = signal.getsignal(signal.SIGTERM)
    for kind, stop in stops.items():
        with pytest.raises(kind), store.run("experiment", "parent", {}) as parent:
            with store.run("experiment", "child", child_of(parent)) as child:
                stop()
        assert [store.client.get_run(run_id).info.status for run_id in (parent, child)] == ["KILLED"] * 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_work_that_was_done_before_it_is_logged(store):
    with store.run("experiment", "past", {}, past=(1000.5, 1010.25)) as run_id:
        pass
    with pytest.raises(RuntimeError), store.run("experiment", "past", {}, past=(1000.5, 1010.25)) as failed:
        raise RuntimeError
    info = store.client.get_run(run_id).info
    assert (info.start_time, info.end_time, info.status) == (1_000_500, 1_010_250, "FINISHED")
    assert store.client.get_run(failed).info.end_time > 1_010_250


def test_runs_are_found_by_their_tags(store):
    assert store.newest_run("no such experiment", {"a": "1"}) is None
    for index, began in enumerate((30.0, 10.0, 20.0)):
        with store.run("found", "r", {"stage": "distill", "number": index}, past=(began, began + 1)):
            pass
    assert store.newest_run("found", {"stage": "distill"}).data.tags["number"] == "0"
    assert store.newest_run("found", {"stage": "distill", "number": "1"}).data.tags["number"] == "1"
    assert store.newest_run("found", {"stage": "other"}) is None


def test_an_unreachable_server_fails_in_seconds():
    """R06"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for uri in (f"http://127.0.0.1:{port}", f"postgresql://me:secret@127.0.0.1:{port}/mlflow"):
        start = time.monotonic()
        with pytest.raises(PipelineError, match="MLFLOW_TRACKING_URI") as error:
            check_store(uri, timeout_seconds=3)
        assert time.monotonic() - start < 15
        assert "secret" not in str(error.value)


def test_a_server_that_never_answers_fails_in_seconds():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        with pytest.raises(PipelineError, match="cannot be used"):
            check_store(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_seconds=1)
        assert time.monotonic() - start < 15


def test_an_unusable_sqlite_file_is_refused(tmp_path):
    (tmp_path / "text.db").write_text("this is not a database at all " * 100)
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "text.db", tmp_path / "file" / "mlflow.db", tmp_path):
        with pytest.raises(PipelineError, match="cannot be used"):
            check_store(f"sqlite:///{path}", timeout_seconds=1)


def test_a_scheme_that_mlflow_does_not_know_is_refused():
    with pytest.raises(PipelineError, match="refused"):
        check_store("gopher://127.0.0.1", timeout_seconds=1)
