"""distill: train the draft on the target's answers.

Reads:  data/answers/{train,dev}, the target (for its layers, tokenizer and compatibility key).
Writes: data/draft/ (a transformers folder with draft.json and head_token_ids.json), data/distill/history.csv; an MLflow
        run.
Does:   trains towards the target's probabilities, stored or from the target beside the draft; keeps the checkpoint of
        the best dev token acceptance. With distill.on_policy.steps > 0 an on-policy phase follows, kept if it raises that
        acceptance further. A killed run continues from its newest checkpoint, in the same MLflow run. What a run has
        written is kept until another one has finished: with the same settings, answers and code it is put back. In a
        launch of several processes all train, and the first one writes.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import hydra
from accelerate import PartialState
from transformers import PreTrainedModel

from pipeline.adapters.answer_files import read_answers, read_facts, shards
from pipeline.adapters.drafts import (
    DRAFT,
    DraftConfig,
    check_distillable,
    check_draft,
    check_frozen_embeddings,
    check_reference_draft,
    initial_draft,
    load_draft,
    read_draft_facts,
    save_draft,
    start_fingerprint,
)
from pipeline.adapters.layer_choice import best_row, try_layers
from pipeline.adapters.mlflow_tracking import StageRun, TrackingConfig, Untracked, stage_run
from pipeline.adapters.on_policy import check_on_policy, on_policy_phase
from pipeline.adapters.processes import check_settings, fingerprint_parts, join, split_target, target_device
from pipeline.adapters.quantization import check_optimizer
from pipeline.adapters.targets import Target, check_same_target
from pipeline.adapters.trainer import distill, write_history
from pipeline.core.answers import GenerateConfig, check_same_settings
from pipeline.core.artifacts import atomic_path, fingerprint, fingerprint_files
from pipeline.core.errors import PipelineError
from pipeline.core.finished import FINISHED, discard_finished, finished_beside, is_finished, mark_finished
from pipeline.core.models import ModelConfig
from pipeline.core.training import DistillConfig
from pipeline.core.vocabulary import domain_token_ids
from pipeline.stage import (
    alone,
    cache_path,
    code_fingerprint,
    execute,
    input_path,
    output_path,
    typed_config,
    write_effective_config,
)

HISTORY = "data/distill/history.csv"


@dataclass
class Config:
    target: ModelConfig
    draft: DraftConfig
    generate: GenerateConfig
    distill: DistillConfig
    seed: int


class _Pair(NamedTuple):
    """What is trained, and for what; checked."""

    target: Target
    start: DraftConfig  # with the version in the place of an alias
    vocabulary: range  # ids that both share
    facts: dict  # of the train answers


def run(config: Config, tracking: TrackingConfig | None = None) -> None:
    """Train the draft and save it, or put back what the same settings, answers and code made last.

    With `tracking`, which changes no result, MLflow follows the training.
    """
    root = input_path("")
    check_optimizer(config.distill.optimizer)
    check_reference_draft(config.distill.reference_draft, root)
    if config.distill.on_policy.steps > 0:
        check_on_policy()
    processes = join()
    check_settings(processes, config.target, config.draft, config.distill)
    pair = _checked_pair(config, processes)
    state = _state(config, pair, fingerprint_parts(processes))
    code, is_main = code_fingerprint("distill"), processes.is_main_process
    with alone("distill", state.name) if is_main else nullcontext():
        if is_finished(state, code):
            if is_main:
                _restore(config, state)
        else:
            if is_main:
                discard_finished(state)  # other code's, or damaged
            with stage_run(tracking, "distill", config, root, state, is_main) as tracked:
                _train(config, pair, state, processes, tracked)
            if is_main:
                mark_finished(state, code, (output_path(DRAFT), output_path(HISTORY)))
        if is_main:
            _tidy(state)
    processes.wait_for_everyone()


def _checked_pair(config: Config, processes: PartialState) -> _Pair:
    """Target and draft, without their weights; raises `PipelineError` where they, or the answers, do not go together."""
    root = input_path("")
    with processes.main_process_first():  # it converts a packaged target, if that is still to be done
        target = Target(config.target, root, target_device())
    start = config.draft.pinned(root)
    vocabulary = check_draft(start, target, root).shared_ids
    check_distillable(start, target, root, config.distill.target_in_loop)
    if config.distill.freeze_embeddings:
        check_frozen_embeddings(start, target, root)
    return _Pair(target, start, vocabulary, _facts_of_answers(config.generate, target))


def _train(config: Config, pair: _Pair, state: Path, processes: PartialState, tracked: StageRun | Untracked) -> None:
    """Train from the newest checkpoints in `state`, and write the outputs."""
    target, vocabulary, root = pair.target, pair.vocabulary, input_path("")
    train = read_answers(input_path("data/answers/train"))
    dev = [a for a in read_answers(input_path("data/answers/dev")) if a.domain == pair.facts["target_domain"]]
    head = domain_token_ids(train, config.distill.head_tokens, target.eos_token_ids, vocabulary)
    reference = _reference_draft(config.distill.reference_draft, target, root)

    def trained(
        settings: DistillConfig, draft: PreTrainedModel, folder: Path, on_log: Callable | None = None
    ) -> list[dict]:
        online = split_target(target.model) if settings.target == "online" else None
        options = {"vocabulary": len(vocabulary), "on_log": on_log, "target": online, "reference": reference}
        return distill(draft, train, dev, head, settings, config.seed, folder, **options)

    start, tried = _with_layers(pair.start, target, head, config.distill, trained, state / "layer_choice")
    with processes.main_process_first():  # it downloads what is not here yet
        draft = initial_draft(start, target, root, config.seed)
    if not config.distill.target_in_loop:
        target.unload()
    history = trained(config.distill, draft, state, tracked.log_row)
    if config.distill.on_policy.steps > 0:
        more = (config.distill, config.seed, history[-1], state / "on_policy", tracked.log_row)
        history += on_policy_phase(draft, target, train, dev, head, vocabulary, *more)
    for row in history:  # those that a killed attempt did not come to send
        tracked.log_row(row)
    if processes.is_main_process:
        _save(config, draft, target, head, start, tried)
        write_history(output_path(HISTORY), history)
        tracked.wrote({"draft_fingerprint": read_draft_facts(output_path(DRAFT))["fingerprint"]})


def _restore(config: Config, state: Path) -> None:
    """Put back what `state` keeps; its MLflow run had ended before, and stays as it is."""
    kept, draft, history = state / FINISHED, output_path(DRAFT), output_path(HISTORY)
    with atomic_path(draft) as folder:
        shutil.copytree(kept / draft.name, folder)
        write_effective_config(folder, config)
    with atomic_path(history) as path:
        shutil.copy2(kept / history.name, path)
    print(
        f"distill: nothing has changed since it last finished; its draft is put back (to train anew, delete {state})."
    )


def _tidy(state: Path) -> None:
    """Leave in `state` its result and the id of its MLflow run, without checkpoints, and of other states those that have not
    finished and those that a process is putting back."""
    for path in state.iterdir():
        if path.is_dir() and path.name != FINISHED:
            shutil.rmtree(path)
    for other in finished_beside(state):
        with suppress(PipelineError), alone("distill", other.name):
            discard_finished(other)


def _save(
    config: Config,
    draft: PreTrainedModel,
    target: Target,
    head: list[int],
    start: DraftConfig,
    tried: list[dict] | None,
) -> None:
    with atomic_path(output_path(DRAFT)) as folder:
        save_draft(folder, draft, target, head, start, tried)
        write_effective_config(folder, config)


def _facts_of_answers(settings: GenerateConfig, target: Target) -> dict:
    """Those of the train answers, which must be this target's under these settings."""
    facts = read_facts(input_path("data/answers/train"))
    check_same_target(facts, target)
    check_same_settings(facts, settings)
    return facts


def _state(config: Config, pair: _Pair, launch: tuple) -> Path:
    """The folder of resumable state, named by all that it depends on but the code."""
    start = (asdict(pair.start), start_fingerprint(pair.start, pair.target, input_path("")))
    files = [path for split in ("train", "dev") for path in shards(input_path(f"data/answers/{split}"))]
    reference = config.distill.reference_draft
    taught_by = read_draft_facts(input_path(reference))["fingerprint"] if reference else None
    parts = (pair.facts, [fingerprint_files([path]) for path in files], asdict(config.distill), *start, config.seed)
    return cache_path("distill", fingerprint(*parts, taught_by, *launch))


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
