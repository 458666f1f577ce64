"""Two processes on a CPU (gloo), started by accelerate launch with the files of conf/accelerate, do what one does."""

from __future__ import annotations

import shutil
import sqlite3
import stat
import subprocess
from pathlib import Path

import distill_process
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from clone import checked, run
from dependencies import ROOT
from hydra import compose, initialize_config_dir
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from pipeline.adapters import processes
from pipeline.adapters.processes import check_command, check_settings
from pipeline.core.errors import PipelineError
from pipeline.distill import Config
from pipeline.stage import CONF_DIR, typed_config

FILES = sorted((ROOT / "conf/accelerate").glob("*.yaml"))


def command(name: str, *words: str) -> list[str]:
    file = f"conf/accelerate/{name}.yaml"
    return ["timeout", "300", "accelerate", "launch", "--config_file", file, "--num_processes", "2", *words]


def launched(name: str, what: str, folder: Path) -> subprocess.CompletedProcess:
    script = str(Path(__file__).with_name("distill_process.py"))
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return run(command(name, script, what, str(folder)), ROOT, **environment)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory) -> tuple[Path, list[subprocess.CompletedProcess]]:
    """A whole run, one that kill -9 ends, and in a second launch its continuation and a run that fails in one process."""
    folder = tmp_path_factory.mktemp("ddp")
    return folder, [launched("ddp", what, folder) for what in ("straight_then_killed", "resumed_then_failing")]


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory) -> Path:
    """A whole run with the target split too, and one that is interrupted and continued."""
    folder = tmp_path_factory.mktemp("fsdp")
    done = launched("fsdp2", "fsdp", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def both(folder: Path, name: str) -> list[dict]:
    return [torch.load(folder / f"{name}-{rank}.pt") for rank in (0, 1)]


def same(found: dict, expected: dict, tolerance: float) -> bool:
    pairs = zip(found["history"], expected["history"], strict=True)
    assert all(row == pytest.approx(other, abs=tolerance) for row, other in pairs)
    return (found["weights"] - expected["weights"]).abs().max() < tolerance


def written_by_others(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.name for path in files if path.stat().st_mode & stat.S_IRGRP}


def test_two_processes_find_the_losses_and_weights_of_one(ddp, tmp_path):
    one = distill_process.result(*distill_process.distilled(tmp_path))
    assert one["history"][-1]["step"] == distill_process.STEPS
    assert all(same(found, one, 1e-5) for found in both(ddp[0], "straight"))


def test_the_saved_draft_is_the_one_in_every_processs_memory(ddp):
    """P09"""
    assert all(found["reloads"] for found in both(ddp[0], "straight"))


def test_the_first_process_alone_writes_and_draws_the_bar(ddp):
    folder, (killed, _) = ddp
    assert written_by_others(folder / "straight") == {"rng_state_1.pth"}
    assert killed.stderr.count("distill:   0%") == 2, "one bar for each of two runs"


def test_a_killed_launch_ends_and_the_next_one_continues(ddp):
    folder, (killed, _) = ddp
    assert killed.returncode not in (0, 124)
    for found, straight in zip(both(folder, "resumed"), both(folder, "straight"), strict=True):
        assert (straight["begun"], found["begun"]) == (0, distill_process.SAVED)
        assert same(found, straight, 1e-6)


def test_a_process_that_fails_ends_the_launch_with_its_message(ddp):
    failed = ddp[1][1]
    assert failed.returncode not in (0, 124)
    assert "error (process " in failed.stderr and "on the answers to p5;" in failed.stderr


def test_split_models_train_as_whole_ones_do(fsdp, tmp_path):
    one = distill_process.result(*distill_process.distilled(tmp_path, online=True))
    assert all(same(found, one, 1e-5) for found in both(fsdp, "straight"))
    (checkpoint,) = (fsdp / "straight").glob(f"checkpoint-{distill_process.STEPS}")
    assert (checkpoint / "pytorch_model_fsdp.bin").is_file(), "FSDP was not at work"
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        assert file.get_slice("model.layers.0.mlp.up_proj.weight").get_shape() == [128, 64]


def test_a_split_run_continues(fsdp):
    for found, straight in zip(both(fsdp, "resumed"), both(fsdp, "straight"), strict=True):
        assert found["begun"] == distill_process.SAVED
        assert same(found, straight, 1e-6)


def test_the_stage_runs_in_two_processes(clone, tmp_path):
    """P09, in a copy: other tests look at what the smoke run made."""
    for name in ("pipeline", "conf", "data/answers", ".cache/models"):
        shutil.copytree(clone / name, tmp_path / name)
    for name in ("dvc.yaml", "mlflow.db"):
        shutil.copy2(clone / name, tmp_path)
    before = tracked_runs(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nos.umask(0o077 if os.environ.get('RANK') == '0' else 0o022)\n"
    )
    words = ("-m", "pipeline.distill", "experiment=smoke", "distill.epochs=2")
    checked(command("ddp", *words), tmp_path, PYTHONPATH=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    shutil.rmtree(tmp_path / "data/answers")
    assert written_by_others(tmp_path / "data") == set()
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"draft", "distill", "provenance"}
    (state,) = (tmp_path / ".cache/distill").iterdir()
    assert sorted(path.name for path in state.iterdir()) == ["finished", "mlflow_run_id"]
    assert (tmp_path / "data/draft/head_token_ids.json").is_file()
    AutoModelForCausalLM.from_pretrained(tmp_path / "data/draft")
    (run,) = tracked_runs(tmp_path).keys() - before.keys()
    assert tracked_runs(tmp_path)[run] == "FINISHED"


def tracked_runs(folder: Path) -> dict[str, str]:
    """Status of each MLflow run of the distill stage, read without MLflow, whose import takes seconds."""
    with sqlite3.connect(folder / "mlflow.db") as store:
        return dict(store.execute("SELECT run_uuid, status FROM runs WHERE name = 'distill'"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_accelerate_takes_every_launch_file(file, monkeypatch):
    monkeypatch.setattr(processes, "is_deepspeed_available", lambda: True)
    check_command(f"accelerate launch --config_file {file.relative_to(ROOT)}", ROOT)


def test_deepspeed_is_told_to_split_weights_and_to_save_them_whole():
    args = launch_command_parser().parse_args(
        ["--config_file", str(ROOT / "conf/accelerate/deepspeed_zero3.yaml"), "x"]
    )
    args, _, _ = _validate_launch_command(args)
    args.deepspeed_fields_from_accelerate_config = ""
    environment = prepare_deepspeed_cmd_env(args)[1]
    assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert environment["ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"] == "true"
    assert environment["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "auto"


@pytest.mark.parametrize(
    ("flags", "words"),
    [({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed, which is not installed.*pip install deepspeed"),
     ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "first version of FSDP.*fsdp2.yaml")],
)  # fmt: skip
def test_a_launch_that_cannot_work_is_refused_before_anything_loads(flags, words, monkeypatch):
    monkeypatch.setattr(processes, "is_deepspeed_available", lambda: False)
    for name, value in flags.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PipelineError, match=words):
        processes.join()


@pytest.mark.parametrize(
    ("command", "words"),
    [("accelerate launch --config_file conf/accelerate/deepspeed_zero3.yaml", "DeepSpeed, which is not installed"),
     ("accelerate launch --config_file conf/accelerate/absent.yaml", "absent.yaml.*does not exist"),
     ("accelerate launch --config_file conf/config.yaml", "distributed_type")],
)  # fmt: skip
def test_a_launch_command_that_cannot_work_is_refused(command, words, monkeypatch):
    monkeypatch.setattr(processes, "is_deepspeed_available", lambda: False)
    with pytest.raises(PipelineError, match=words):
        check_command(command, ROOT)


@pytest.mark.parametrize(
    ("split", "overrides", "words"),
    [("FSDP", ["distill.optimizer=adamw_8bit"], "adamw_8bit.*ddp.yaml"),
     ("FSDP", ["draft=pruned_chosen"], "layer_choice.*keep_layers"),
     ("DeepSpeed", ["target.quantization=4bit", "distill.target=online"], "4bit.*ddp.yaml"),
     (None, ["target.device_map=auto"], "device_map.*fsdp2.yaml")],
)  # fmt: skip
def test_settings_that_several_processes_cannot_share_are_refused(split, overrides, words, monkeypatch):
    monkeypatch.setattr(processes, "sharding", lambda: split)
    with initialize_config_dir(CONF_DIR, version_base="1.3"):
        config = typed_config(compose("config", overrides=overrides), Config)
    two, one = (type("State", (), {"num_processes": count}) for count in (2, 1))
    settings = (config.target, config.draft, config.distill)
    check_settings(one, *settings)
    with pytest.raises(PipelineError, match=words):
        check_settings(two, *settings)
