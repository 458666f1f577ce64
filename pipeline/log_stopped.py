"""log_stopped: note in MLflow that a stage of the pipeline stopped before its end; `pipeline.stage` calls it.

Reads:  the configuration of the stage's process, as YAML, from standard input
Writes: a run of the pipeline and in it one of the stage, both FAILED or KILLED, with the configuration and the reason, and
        the id of the run in which the stage was followed, if it was. A registration that got so far has its tree already.
Does:   nothing that could fail the caller once more: a store that cannot be used costs a line.
"""

from __future__ import annotations

import argparse
import os
import sys

from omegaconf import OmegaConf

from pipeline.adapters.mlflow_store import RunStore, check_store, child_of, git_tags, made_by, resolve_tracking_uri
from pipeline.core.errors import PipelineError
from pipeline.register import Config
from pipeline.stage import input_path, typed_config


def log_stopped(stage: str, status: str, began: float, reason: str, config: str) -> None:
    """A parent and a child, begun at `began` (Unix seconds) by the process that called this one, ended now as `status`."""
    root = input_path("")
    registry = typed_config(OmegaConf.create(config), Config).registry
    uri = resolve_tracking_uri(registry.tracking_uri, root)
    check_store(uri, registry.timeout_seconds)
    store = RunStore(uri)
    tags = {"stage": stage, "stopped_by": reason, **git_tags(root)}
    own = store.newest_run(registry.experiment_name, made_by(os.getppid()))
    if own is not None and (own.info.end_time or 0) >= 1000 * began:
        if stage == "register":
            return
        tags["live_run"] = own.info.run_id
    parent = store.create_run(registry.experiment_name, registry.model_name, tags, began).info.run_id
    child = store.create_run(registry.experiment_name, stage, {**child_of(parent), **tags}, began).info.run_id
    for run_id in (child, parent):
        store.log_text(run_id, "config.yaml", config)
        store.end_run(run_id, status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage")
    parser.add_argument("status", choices=["FAILED", "KILLED"])
    parser.add_argument("began", type=float)
    parser.add_argument("reason")
    try:
        log_stopped(**vars(parser.parse_args()), config=sys.stdin.read())
    except PipelineError as error:
        print(f"not logged in MLflow: {error.reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
