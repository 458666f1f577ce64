"""The frame that every stage shares: typed config, places of files, quiet logs, one-line errors."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import importlib.metadata
import logging
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from yaml import YAMLError

from pipeline.core.artifacts import fingerprint_files, read_json, write_json
from pipeline.core.ending import ending
from pipeline.core.errors import PipelineError

PROJECT_ROOT = Path(__file__).resolve().parent.parent
CONF_DIR = str(PROJECT_ROOT / "conf")
COLUMNS_WITHOUT_TERMINAL = 160
CHAMPION_FILE = "data/champion/metrics.json"  # written by promotion
CHAMPION_SCHEMA = ("domain-draft/champion", 1)
PROVENANCE_SCHEMA = ("domain-draft/provenance", 1)
REFUSED_BY_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
STORE_TIMEOUT_SECONDS = 10.0  # of reads of the MLflow store for which no configuration says how long to wait

ConfigT = TypeVar("ConfigT")


def input_path(relative: str) -> Path:
    """A file of the project, whatever the working directory is."""
    return PROJECT_ROOT / relative


def output_path(relative: str) -> Path:
    """Where a stage writes: the project, or the job's own folder under a Hydra multirun."""
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        return Path(HydraConfig.get().runtime.output_dir) / relative
    return PROJECT_ROOT / relative


def read_champion() -> dict[str, Any] | None:
    """What promotion wrote about the present champion; None before the first."""
    path = input_path(CHAMPION_FILE)
    try:
        return read_json(path, *CHAMPION_SCHEMA) if path.exists() else None
    except PipelineError as error:  # without the file the rules against the champion would not apply
        raise PipelineError(error.reason, "`python -m pipeline.promote --list` writes it anew.") from None


def cache_path(stage: str, key: str) -> Path:
    """The git-ignored folder for resumable state of `stage`, one per `key` (a fingerprint of all it depends on)."""
    return PROJECT_ROOT / ".cache" / stage / key


@contextlib.contextmanager
def alone(stage: str, key: str) -> Iterator[None]:
    """Raise `PipelineError` while another process works with the same resumable state: each would take away the other's."""
    path = cache_path("locks", f"{stage}-{key}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PipelineError(
                f"Another process runs {stage} here already, with the same inputs and settings.",
                f"wait for it, or end it (`pgrep -f pipeline.{stage}`).",
            ) from None
        yield


def typed_config(cfg: DictConfig, schema: type[ConfigT]) -> ConfigT:
    """Check `cfg` against the fields of `schema` and return a plain dataclass.

    Groups that `schema` does not name are left out; inside a group an unknown key or a wrong type is an error.
    """
    OmegaConf.resolve(cfg)
    names = [field.name for field in dataclasses.fields(schema)]
    missing = [name for name in names if name not in cfg]
    if missing:
        raise PipelineError(
            f"The configuration lacks {', '.join(missing)}.", "run `make params` to compose params.yaml anew."
        )
    if "seed" in names and isinstance(cfg.seed, int) and cfg.seed < 0:
        raise PipelineError(f"seed is {cfg.seed}.", "give a number from 0 on.")
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.masked_copy(cfg, names)))
    except (OmegaConfBaseException, ValueError) as error:
        line = str(error).strip().splitlines()[0]
        key = getattr(error, "full_key", None)
        where = f" at `{key}`" if key else ""
        raise PipelineError(
            f"Invalid configuration{where}: {line}", "correct the override or the file in conf/."
        ) from None


def write_effective_config(directory: Path, config: Any) -> None:
    """Write the config that a stage ran with as `config.yaml` into its artifact."""
    (directory / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)), encoding="utf-8")


def console() -> Console:
    """For tables: as wide as the terminal, and wide in a file or a pipe."""
    terminal = Console(highlight=False, markup=False)
    return terminal if terminal.is_terminal else Console(highlight=False, markup=False, width=COLUMNS_WITHOUT_TERMINAL)


def execute(run: Callable[[ConfigT], None], schema: type[ConfigT], cfg: DictConfig) -> None:
    """Run a stage from its `@hydra.main`: type the config, end a user's error in one line and exit code 1.

    Of several processes (RANK is set by accelerate launch and torchrun) the first one writes the provenance.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    started, stage = time.time(), Path(run.__code__.co_filename).stem
    with _stops_logged(stage, started, cfg):
        try:
            check_writable(output_path("data"))
            values = _values_in_use(schema)
            run(typed_config(cfg, schema))
            if _values_in_use(schema) != values:  # DVC would record what is there now as what the stage ran with
                raise PipelineError(
                    "The stage's values in params.yaml changed while this stage ran: its result is not recorded.",
                    "run `make repro` again with the values that you want, one run at a time.",
                )
        except (PipelineError, OSError) as error:
            if isinstance(error, OSError):
                if error.errno not in REFUSED_BY_THE_DISK:
                    raise
                error = PipelineError(f"{error}.", "free space or give write permission, then run it again.")
            place = f" (process {os.environ['RANK']})" if "RANK" in os.environ else ""
            print(f"error{place}: {error}", file=sys.stderr)
            sys.exit(1)
    if os.environ.get("RANK", "0") == "0":
        write_provenance(stage, started)
        if (written := output_path("data")) != input_path("data"):
            print(f"written to {written}")


def _stops_logged(stage: str, started: float, cfg: DictConfig) -> contextlib.AbstractContextManager[None]:
    """Of a stage in the pipeline that stops in the block MLflow hears from a process of its own, since nothing else in most
    stages needs the store."""
    if _params_in_use() is None or os.environ.get("RANK", "0") != "0":
        return contextlib.nullcontext()

    def end(status: str) -> None:
        if status != "FINISHED":
            error = sys.exception()
            cause = error.__context__ if status == "FAILED" and isinstance(error, SystemExit) else error
            _log_stopped([stage, status, str(started), f"{type(cause).__name__}: {cause}"], OmegaConf.to_yaml(cfg))

    return ending(end)


def _log_stopped(arguments: list[str], config: str) -> None:
    command = [sys.executable, "-m", "pipeline.log_stopped", *arguments]
    subprocess.run(command, cwd=PROJECT_ROOT, input=config, text=True, check=False)


def _params_in_use() -> bytes | None:
    """The bytes of params.yaml where the stage takes its values from there."""
    if HydraConfig.initialized() and HydraConfig.get().job.config_name == "from_params":
        return input_path("params.yaml").read_bytes()
    return None


def _values_in_use(schema: type) -> dict[str, Any] | None:
    """What params.yaml holds for the groups of `schema`, where the stage takes its values from there; a file that is being
    edited and cannot be parsed holds nothing."""
    if (text := _params_in_use()) is None:
        return None
    try:
        found = OmegaConf.to_container(OmegaConf.create(text.decode()))
    except (YAMLError, OmegaConfBaseException):
        return {}
    return {field.name: found.get(field.name) for field in dataclasses.fields(schema)}


def code_fingerprint(stage: str) -> str:
    """Of the modules that dvc.yaml lists for `stage`, whose change lets DVC run it again."""
    root = Path(__file__).resolve().parent.parent
    listed = OmegaConf.load(root / "dvc.yaml").stages[stage].deps
    return fingerprint_files([root / path for path in listed if path.endswith(".py")])


def check_writable(folder: Path) -> None:
    """Fail before the work, not after it, where its results cannot be kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PipelineError(
            f"{folder} cannot be written ({error.strerror}).", "make it a folder with write permission and free space."
        ) from None


def read_provenance(stage: str) -> dict[str, Any] | None:
    """What `write_provenance` recorded; None where it did not come with the artifacts."""
    path = input_path(f"data/provenance/{stage}.json")
    return read_json(path, *PROVENANCE_SCHEMA) if path.exists() else None


def write_provenance(stage: str, started: float) -> None:
    """Record beside the artifacts, in a file that nothing depends on, what a stage ran with and on."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=PROJECT_ROOT, capture_output=True, text=True, check=False)
    packages = ("torch", "transformers", "accelerate", "datasets", "trl", "mlflow", "dvc", "hydra-core", "numpy")
    facts = {
        "stage": stage,
        "command": sys.argv,
        "started_unix_seconds": round(started, 3),
        "seconds": round(time.time() - started, 3),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "git_commit": git.stdout.strip() or None,
        "python": platform.python_version(),
        "machine": {"platform": platform.platform(), "processors": os.cpu_count()},
        "packages": {name: importlib.metadata.version(name) for name in packages},
    }
    write_json(output_path(f"data/provenance/{stage}.json"), *PROVENANCE_SCHEMA, facts)
