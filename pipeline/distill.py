"""distill: train the draft on the target's answers.

Reads:  data/answers/{train,dev}, the target (for its layers, tokenizer and compatibility key).
Writes: data/draft/ (a transformers folder with draft.json and head_token_ids.json), data/distill/history.csv; an MLflow
        run.
Does:   trains towards the target's probabilities, stored or from the target beside the draft; keeps the checkpoint of
        the best dev token acceptance. With distill.on_policy.steps > 0 an on-policy phase follows, kept if it raises that
        acceptance further. A killed run continues from its newest checkpoint, in the same MLflow run. In a launch of
        several processes all train, and the first one writes.
"""

from __future__ import annotations

import fcntl
import functools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import hydra
from transformers import PreTrainedModel

from pipeline.adapters.answer_files import read_answers, read_facts, shards
from pipeline.adapters.drafts import (
    DraftConfig,
    check_distillable,
    check_draft,
    check_frozen_embeddings,
    initial_draft,
    load_draft,
    read_draft_facts,
    save_draft,
    start_fingerprint,
)
from pipeline.adapters.layer_choice import best_row, try_layers
from pipeline.adapters.mlflow_tracking import TrackingConfig, stage_run
from pipeline.adapters.on_policy import check_on_policy, on_policy_phase
from pipeline.adapters.processes import check_settings, fingerprint_parts, join, split_target, target_device
from pipeline.adapters.quantization import check_optimizer
from pipeline.adapters.targets import Target, check_same_target
from pipeline.adapters.trainer import distill, write_history
from pipeline.core.answers import GenerateConfig, check_same_settings
from pipeline.core.artifacts import atomic_path, fingerprint, fingerprint_files
from pipeline.core.errors import PipelineError
from pipeline.core.models import ModelConfig
from pipeline.core.training import DistillConfig
from pipeline.core.vocabulary import domain_token_ids
from pipeline.stage import cache_path, execute, input_path, output_path, typed_config, write_effective_config


@dataclass
class Config:
    target: ModelConfig
    draft: DraftConfig
    generate: GenerateConfig
    distill: DistillConfig
    seed: int


def run(config: Config, tracking: TrackingConfig | None = None) -> None:
    """Train the draft and save it. With `tracking`, which changes no result, MLflow follows."""
    root = input_path("")
    online, on_policy = config.distill.target == "online", config.distill.on_policy.steps > 0
    check_optimizer(config.distill.optimizer)
    if on_policy:
        check_on_policy()
    processes = join()
    check_settings(processes, config.target, config.draft, config.distill)
    with processes.main_process_first():  # it converts a packaged target, if that is still to be done
        target = Target(config.target, root, target_device())
    start = config.draft.pinned(root)
    vocabulary = check_draft(start, target, root).shared_ids
    check_distillable(start, target, root, config.distill.target_in_loop)
    if config.distill.freeze_embeddings:
        check_frozen_embeddings(start, target, root)
    facts = _facts_of_answers(config.generate, target)
    checkpoints = _checkpoints(config, start, target, facts, fingerprint_parts(processes))
    with (
        _alone(checkpoints.name) if processes.is_main_process else nullcontext(),
        stage_run(tracking, "distill", config, root, checkpoints, processes.is_main_process) as tracked,
    ):
        train = read_answers(input_path("data/answers/train"))
        dev = [a for a in read_answers(input_path("data/answers/dev")) if a.domain == facts["target_domain"]]
        head = domain_token_ids(train, config.distill.head_tokens, target.eos_token_ids, vocabulary)
        reference = _reference_draft(config.distill.reference_draft, target, root)

        def trained(
            settings: DistillConfig, draft: PreTrainedModel, folder: Path, on_log: Callable | None = None
        ) -> list[dict]:
            models = {"target": split_target(target.model) if online else None, "reference": reference}
            options = {"vocabulary": len(vocabulary), "on_log": on_log, **models}
            return distill(draft, train, dev, head, settings, config.seed, folder, **options)

        start, tried = _with_layers(start, target, head, config.distill, trained, checkpoints / "layer_choice")
        with processes.main_process_first():  # it downloads what is not here yet
            draft = initial_draft(start, target, root, config.seed)
        if not config.distill.target_in_loop:
            target.unload()
        history = trained(config.distill, draft, checkpoints, tracked.log_row)
        if on_policy:
            data = (train, dev, head, vocabulary)
            folder = checkpoints / "on_policy"
            more = (config.distill, config.seed, history[-1], folder, tracked.log_row)
            history += on_policy_phase(draft, target, *data, *more)
        for row in history:  # those that a killed attempt did not come to send
            tracked.log_row(row)
        if processes.is_main_process:
            _save(config, draft, target, head, start, tried)
            write_history(output_path("data/distill/history.csv"), history)
            tracked.wrote({"draft_fingerprint": read_draft_facts(output_path("data/draft"))["fingerprint"]})
    if processes.is_main_process:
        shutil.rmtree(checkpoints)
    processes.wait_for_everyone()


def _save(
    config: Config,
    draft: PreTrainedModel,
    target: Target,
    head: list[int],
    start: DraftConfig,
    tried: list[dict] | None,
) -> None:
    with atomic_path(output_path("data/draft")) as folder:
        save_draft(folder, draft, target, head, start, tried)
        write_effective_config(folder, config)


def _facts_of_answers(settings: GenerateConfig, target: Target) -> dict:
    """Those of the train answers, which must be this target's under these settings."""
    facts = read_facts(input_path("data/answers/train"))
    check_same_target(facts, target)
    check_same_settings(facts, settings)
    return facts


def _checkpoints(config: Config, start: DraftConfig, target: Target, facts: dict, launch: tuple) -> Path:
    """The folder of resumable state, named by all that it depends on."""
    settings = (asdict(config.distill), asdict(start), start_fingerprint(start, target, input_path("")), config.seed)
    files = [path for split in ("train", "dev") for path in shards(input_path(f"data/answers/{split}"))]
    reference = config.distill.reference_draft
    taught_by = read_draft_facts(input_path(reference))["fingerprint"] if reference else None
    parts = (facts, [fingerprint_files([path]) for path in files], *settings, taught_by, *launch)
    return cache_path("distill", fingerprint(*parts))


@contextmanager
def _alone(key: str) -> Iterator[None]:
    """Raise `PipelineError` while another process distils with the same state: each would take away the other's checkpoints."""
    path = cache_path("locks", f"distill-{key}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PipelineError(
                "Another process distils this draft here already.",
                "wait for it, or end it (`pgrep -f pipeline.distill`).",
            ) from None
        yield


def _with_layers(
    start: DraftConfig, target: Target, head: list[int], settings: DistillConfig, train: Callable, folder: Path
) -> tuple[DraftConfig, list[dict] | None]:
    """`start` with its layers named, and what they were chosen from if they were not before."""
    if start.layer_choice is None:
        return start, None
    brief = replace(settings, epochs=start.layer_choice.epochs, evaluations=1)
    tried = try_layers(start, target, head, functools.partial(train, brief), folder)
    return replace(start, layer_choice=None, keep_layers=best_row(tried)["layers"]), tried


def _reference_draft(folder: str | None, target: Target, root: Path) -> PreTrainedModel | None:
    return load_draft(root / folder, target)[0].float() if folder else None


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg):
    execute(lambda config: run(config, typed_config(cfg.registry, TrackingConfig)), Config, cfg)


if __name__ == "__main__":
    main()
