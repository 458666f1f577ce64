"""evaluate: measure the draft in our decoder, beside what one could use instead.

Reads:  data/draft, data/answers/{dev,golden}, the target, data/champion/metrics.json if any (and the draft that it names, from
        the registry).
Writes: data/eval/metrics.json (everything), summary.json (headline figures, the DVC metric), requests.parquet and
        rounds.parquet (raw counts of all that was timed).
Does:   token acceptance on all golden answers; the draft length chosen on dev; acceptance, speed and waiting times of prompt
        lookup, siblings off the shelf, the undistilled and the distilled draft and the champion on golden prompts, paired with
        plain decoding; the distilled draft, or with evaluate.baselines_everywhere all of them, by draft length, batch size and
        temperature, on the target domain or on all (evaluate.condition_prompts_other); losslessness in float32. A candidate
        that is not to be had is skipped by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hydra
import torch

from pipeline.adapters.answer_files import read_answers, read_facts
from pipeline.adapters.drafts import (
    DraftConfig,
    check_draft,
    initial_draft,
    load_draft,
    off_the_shelf,
    read_draft_facts,
)
from pipeline.adapters.model_sources import resolve_model
from pipeline.adapters.registered_drafts import find_registered
from pipeline.adapters.request_files import write_requests
from pipeline.adapters.targets import Target, check_same_target
from pipeline.core.answers import Answer
from pipeline.core.artifacts import atomic_path, fingerprint, write_json
from pipeline.core.comparison import evaluate, summarise
from pipeline.core.errors import PipelineError
from pipeline.core.evaluation_settings import (
    CHAMPION,
    DISTILLED,
    UNDISTILLED,
    Contestants,
    DecodeSettings,
    Draft,
    EvaluateConfig,
    Sibling,
)
from pipeline.core.models import ModelConfig, cast_parameters, load_model
from pipeline.stage import (
    STORE_TIMEOUT_SECONDS,
    execute,
    input_path,
    output_path,
    read_champion,
    write_effective_config,
)


class Incomparable(PipelineError):
    """There is no champion that could be compared with the draft; running again would not bring one."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, "none needed.")


@dataclass
class Config:
    target: ModelConfig
    draft: DraftConfig
    decode: DecodeSettings
    evaluate: EvaluateConfig
    seed: int


def run(config: Config) -> None:
    target = Target(config.target, input_path(""))
    champion = read_champion()
    facts = read_facts(input_path("data/answers/golden"))
    check_same_target(facts, target)
    made = read_draft_facts(input_path("data/draft"))
    models = contestants(config, target, made, facts["target_domain"], champion)
    dev, golden = (read_answers(input_path(f"data/answers/{split}")) for split in ("dev", "golden"))
    outcome = evaluate(models, dev, golden, config.decode, config.evaluate, config.seed)
    if read_champion() != champion:
        raise PipelineError("Another draft became champion while this one was evaluated.", "run `dvc repro` again.")
    metrics = {
        "target": {"name": config.target.name, "id": config.target.id, "revision": config.target.revision},
        "compatibility_key": target.compatibility_key,
        "draft_fingerprint": made["fingerprint"],
        "champion": champion
        and {name: champion[name] for name in ("model_name", "version", "fingerprint")}
        | {"comparable": models.comparable},
        "prompts": {"dev_prompts": _prompts_fingerprint(dev), "golden_prompts": _prompts_fingerprint(golden)},
        **outcome.metrics,
    }
    with atomic_path(output_path("data/eval")) as folder:
        folder.mkdir()
        write_json(folder / "metrics.json", "domain-draft/metrics", 1, metrics)
        write_json(folder / "summary.json", "domain-draft/summary", 1, summarise(metrics))
        write_requests(folder, outcome.requests)
        write_effective_config(folder, config)


def contestants(
    config: Config, target: Target, made: dict[str, Any], domain: str, champion: dict[str, Any] | None
) -> Contestants:
    """Everything that takes part, in the order of the tables; `made` are the facts of data/draft, `champion` what promotion
    wrote about the present one."""
    root = input_path("")
    start = config.draft.recorded(made)
    check_draft(start, target, root)
    distilled, head = load_draft(input_path("data/draft"), target)
    undistilled = cast_parameters(initial_draft(start, target, root, config.seed), distilled.dtype)
    drafts: dict[str, Draft] = {}
    skipped = {} if config.evaluate.siblings else {"siblings": "none are named in evaluate.siblings"}
    for sibling in config.evaluate.siblings:
        try:
            drafts[sibling.name] = _sibling(sibling, target, made["dtype"])
        except PipelineError as error:
            skipped[sibling.name] = error.reason
        except torch.OutOfMemoryError:
            skipped[sibling.name] = f"{sibling.id} does not fit into memory beside the target"
    drafts[UNDISTILLED] = Draft(undistilled, head)
    drafts[DISTILLED] = Draft(distilled, head)
    comparable = True
    try:
        drafts[CHAMPION] = _champion(champion, target, made, domain)
    except PipelineError as error:
        skipped[CHAMPION] = error.reason
        comparable = not isinstance(error, Incomparable)
    vocabulary = range(target.vocabulary_size)
    return Contestants(target.model, drafts, config.decode.draft_half_weights, vocabulary, domain, skipped, comparable)


def _sibling(sibling: Sibling, target: Target, dtype: str) -> Draft:
    start = off_the_shelf(sibling.name, sibling.id, sibling.revision)
    shared = check_draft(start, target, input_path("")).shared_ids
    location = resolve_model(sibling.id, input_path(""))
    return Draft(load_model(location, ModelConfig(**{**vars(sibling), "dtype": dtype})), list(shared))


def _champion(champion: dict[str, Any] | None, target: Target, made: dict[str, Any], domain: str) -> Draft:
    """The champion's draft from the registry, at the k that it is served with.

    Raises `Incomparable` where there is no other draft of this target and domain, `PipelineError` where it is not to be had.
    """
    if champion is None:
        raise Incomparable("no draft was promoted yet")
    if champion["compatibility_key"] != target.compatibility_key:
        raise Incomparable("the champion drafts for another target")
    if champion["domain"] != domain:
        raise Incomparable(f"the champion drafts for the domain {champion['domain']}")
    if champion["fingerprint"] == made["fingerprint"]:
        raise Incomparable("the champion is this very draft")
    uri = f"models:/{champion['model_name']}/{champion['version']}"
    root = input_path("")
    registered = find_registered(uri, champion["tracking_uri"], STORE_TIMEOUT_SECONDS, root)
    if registered.facts["template"] != target.template:
        raise Incomparable("the champion was distilled under another chat template")
    return Draft(*load_draft(registered.folder(root), target), champion["metrics"]["settings"]["draft_length"])


def _prompts_fingerprint(answers: list[Answer]) -> str:
    """Of the prompts' tokens, whatever their order: figures over different prompts compare loosely."""
    return fingerprint(sorted((answer.prompt_id, answer.prompt_ids.tolist()) for answer in answers))


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg):
    execute(run, Config, cfg)


if __name__ == "__main__":
    main()
