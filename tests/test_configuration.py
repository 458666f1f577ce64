"""conf/, params.yaml, dvc.yaml and the code say the same."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys

import pytest
import yaml
from dependencies import ROOT, closure
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from pipeline import stage
from pipeline.compose import composed
from pipeline.core.errors import PipelineError

DVC = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
STAGES = list(DVC["stages"])
EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
GROUP_FILES = sorted(
    path.relative_to(ROOT / "conf").with_suffix("")
    for path in (ROOT / "conf").rglob("*.yaml")
    if path.parent != ROOT / "conf" and path.parent.name not in ("hydra", "experiment", "accelerate")
)


def config_of(name: str):
    return importlib.import_module(f"pipeline.{name}").Config


def loaded(overrides: list[str]):
    with initialize_config_dir(stage.CONF_DIR, version_base="1.3"):
        return compose("config", overrides=overrides)


@pytest.mark.parametrize("experiment", [None, *EXPERIMENTS])
def test_every_experiment_composes_and_types(experiment):
    cfg = loaded([f"experiment={experiment}"] if experiment else [])
    for name in [*STAGES, "diagnose"]:
        stage.typed_config(cfg, config_of(name))


@pytest.mark.parametrize("path", GROUP_FILES, ids=str)
def test_every_group_file_composes_and_types(path):
    cfg = loaded([f"{path.parent}={path.name}"])
    for name in STAGES:
        stage.typed_config(cfg, config_of(name))


def test_all_group_files_are_found():
    assert {path.parent.name for path in GROUP_FILES} >= {
        "target", "draft", "domain", "generate", "distill", "decode", "evaluate", "gate", "registry", "launch",
        "roi", "diagnose",
    }  # fmt: skip
    assert len(EXPERIMENTS) >= 5


def test_params_are_what_conf_composes():
    assert (ROOT / "params.yaml").read_text(encoding="utf-8") == composed([]), (
        "run `make params` and commit params.yaml"
    )


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_lists_the_params_it_reads(name):
    assert DVC["stages"][name]["params"] == [field.name for field in dataclasses.fields(config_of(name))]


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_lists_the_modules_it_imports(name):
    listed = {path for path in DVC["stages"][name]["deps"] if path.startswith("pipeline/")}
    needed = {str(path.relative_to(ROOT)) for path in closure(ROOT / "pipeline" / f"{name}.py")}
    modules = {path for path in listed if path.endswith(".py")}
    assert modules == needed
    assert listed - modules == ({"pipeline/adapters/report.html.j2"} if name == "report" else set())


def test_core_imports_nothing_heavy():
    """All modules of pipeline.core in a fresh process: the decoder runs on a bare accelerator machine."""
    forbidden = ["hydra", "omegaconf", "mlflow", "dvc", "trl", "bitsandbytes", "datasets"]
    modules = sorted(path.stem for path in (ROOT / "pipeline" / "core").glob("*.py") if path.stem != "__init__")
    assert {"decoding", "batches", "gating"} <= set(modules)
    code = (
        "import importlib, sys\n"
        f"for name in {modules}:\n"
        "    importlib.import_module('pipeline.core.' + name)\n"
        f"found = [name for name in {forbidden} if name in sys.modules]\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_core_imports_no_adapter_and_adapters_no_stage():
    stages = {
        ROOT / "pipeline" / f"{name}.py"
        for name in [*STAGES, "diagnose", "promote", "stage", "compose", "summary", "log_stopped"]
    }
    for path in (ROOT / "pipeline" / "core").glob("*.py"):
        assert all(found.parent.name == "core" for found in closure(path)), path
    for path in (ROOT / "pipeline" / "adapters").glob("*.py"):
        assert not closure(path) & stages, path


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("generate.max_new_tokens=many", "generate.max_new_tokens"),
        ("distill.learning_rate=fast", "distill.learning_rate"),
        ("+generate.max_new_token=3", "max_new_token"),
        ("draft.init=magic", "draft.init"),
        ("target.dtype=float8", "dtype"),
        ("decode.top_p=2", "top_p"),
    ],
)
def test_wrong_values_end_in_one_line(override, words):
    cfg = loaded([override])
    with pytest.raises(PipelineError, match=words):
        for name in STAGES:
            stage.typed_config(OmegaConf.create(OmegaConf.to_container(cfg)), config_of(name))


def test_scientific_notation_is_a_number_or_an_error():
    """PyYAML reads 1e-5 as text; typing turns it into the number."""
    cfg = OmegaConf.create(yaml.safe_load(composed([])))
    cfg.distill.learning_rate = "1e-5"
    assert stage.typed_config(cfg, config_of("distill")).distill.learning_rate == 1e-5


def test_an_unknown_override_names_itself():
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.compose", "distill.learning_rat=1"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0 and "learning_rat" in done.stderr and "Traceback" not in done.stderr
