"""Benchmarks are scripts, not a package: loaded as modules, or run as on a bare GPU machine."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from dependencies import ROOT

BENCHMARKS = ROOT / "benchmarks"
ABSENT_ON_A_GPU_MACHINE = ("hydra", "omegaconf", "gguf", "mlflow", "dvc", "trl", "datasets", "pyarrow", "bitsandbytes")


def load(name: str) -> ModuleType:
    """The script `name` as a module, its neighbours importable as when it is run."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)


def run_tiny(name: str, folder: Path) -> tuple[dict, str]:
    """The document and the printed text of a tiny run of a GPU benchmark, as on a bare GPU machine."""
    output = folder / "result.json"
    done = run_bare(name, "--device", "cpu", "--tiny", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(output.read_text(encoding="utf-8")), done.stdout


def run_bare(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh process in which the packages that a bare GPU machine lacks cannot be imported."""
    code = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({ABSENT_ON_A_GPU_MACHINE!r}))\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        f"sys.argv = {[name, *arguments]!r}\n"
        f"runpy.run_path({str(BENCHMARKS / name)!r}, run_name='__main__')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
