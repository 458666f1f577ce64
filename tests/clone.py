"""Commands in a copy of the project, with this interpreter's environment first on the path."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from dependencies import ROOT


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in os.environ.items() if name not in ("MLFLOW_TRACKING_URI", "PYTHONPATH")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**inherited, "PATH": path, **environment}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def checked(command: list[str], folder: Path, **environment: str) -> str:
    done = run(command, folder, **environment)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def copy_project(folder: Path) -> None:
    """The project's files, committed or not, in a git repository of their own."""
    names = checked(["git", "ls-files", "-coz", "--exclude-standard"], ROOT).split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "t"]):
        checked(["git", *command], folder)
