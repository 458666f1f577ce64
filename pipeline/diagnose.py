"""diagnose: would this run work here, and what would it take?

Reads:  the configuration; configs and tokenizers of target and draft, but no weights. With diagnose.score=true also
        data/answers/{train,dev} and the weights of the drafts (data/draft and the champion's if any), not the target's.
Writes: nothing; prints one line per check.
Does:   checks the models, the pair, the sources and the registry; compares the memory and disk that the stages need
        with what is free; says what the draft costs where it is served and from which acceptance on it pays. All
        failures are shown, not only the first; any makes the exit code 1.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import hydra
import torch
from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel

from pipeline.adapters import target_checks
from pipeline.adapters.draft_scores import (
    Scoring,
    StoredAnswers,
    read_stored_answers,
    score_distilled,
    score_lookup,
    score_start,
    takes_weights_of_target,
)
from pipeline.adapters.drafts import (
    DraftConfig,
    check_distillable,
    check_draft,
    check_frozen_embeddings,
    check_made_for,
    check_reference_draft,
    draft_architecture,
    off_the_shelf,
)
from pipeline.adapters.model_sources import resolve_model
from pipeline.adapters.processes import LaunchConfig, check_command
from pipeline.adapters.quantization import check_optimizer
from pipeline.adapters.registered_drafts import RegisteredDraft, find_registered
from pipeline.adapters.sources import READERS, SourceConfig, find_files
from pipeline.adapters.targets import Target
from pipeline.core import footprint, pair_checks
from pipeline.core.checks import Finding, Passed, Report, size_text
from pipeline.core.comparison import machine
from pipeline.core.errors import PipelineError
from pipeline.core.evaluation_settings import DecodeSettings, EvaluateConfig, check_draft_lengths
from pipeline.core.gating import check_rules
from pipeline.core.models import (
    ModelConfig,
    default_device,
    eos_token_ids,
    load_generation_config,
    load_tokenizer,
    max_positions,
    resolve_dtype,
)
from pipeline.core.pruning import keep_layers
from pipeline.core.report_page import TOKEN_ACCEPTANCE, measured
from pipeline.core.roi import RoiConfig
from pipeline.core.templates import encode_prompts, template_fingerprint
from pipeline.core.training import DistillConfig
from pipeline.gate import GateConfig
from pipeline.generate import GenerateConfig
from pipeline.prepare import DomainConfig
from pipeline.register import RegistryConfig, check_receipt
from pipeline.stage import CHAMPION_FILE, execute, input_path, read_champion

SPREAD = (
    "spread the target over devices (target.device_map=auto, or tensor parallelism where one's own code loads it), or"
    " evaluate through the serving engine"
)
SKIPPED = "none needed: evaluate skips it."
TIGHT = 0.85  # share of what is free from which on a need is worth a warning
FILLER = "the Licensee shall not assign or transfer this Agreement without the written consent of the Licensor".split()


@dataclass
class DiagnoseConfig:
    """What is looked at beyond the run itself."""

    score: bool  # token acceptance of the drafts at hand, from stored answers
    batch: int  # requests that the service decodes together
    context_tokens: int | None  # of each of them, prompt and answer; null: as many as this run's longest
    memory_gib: float | None  # of the machine that serves, for weights and caches; null: what is free here

    def __post_init__(self) -> None:
        for name in ("batch", "context_tokens", "memory_gib"):
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise ValueError(f"diagnose.{name} must be > 0, got {value}")


@dataclass
class Config:
    target: ModelConfig
    draft: DraftConfig
    domain: DomainConfig
    generate: GenerateConfig
    distill: DistillConfig
    decode: DecodeSettings
    evaluate: EvaluateConfig
    gate: GateConfig
    roi: RoiConfig
    registry: RegistryConfig
    launch: LaunchConfig
    diagnose: DiagnoseConfig


def diagnose(config: Config, root: Path) -> Report:
    """Run every check that can run."""
    report = Report()
    report.check("machine", _machine)
    model = report.check("target configuration", lambda: target_checks.configuration(config.target, root))
    cache = report.check("target cache", target_checks.cache, model)
    tokenizer = report.check("target tokenizer", lambda found: target_checks.tokenizer(config.target, *found), model)
    report.check("end of answers", lambda *found: target_checks.end_of_answers(config.target, *found), model, tokenizer)
    report.check("generation rules", lambda found: target_checks.generation_rules(config.target, found), model)
    report.check("target quantization", lambda: target_checks.quantization(config.target))
    report.check("optimizer", lambda: _optimizer(config.distill.optimizer))
    report.check("draft lengths", lambda: _draft_lengths(config))
    report.check("gate", lambda: _gate(config))
    report.check("money", lambda: _money(config))
    target = report.check("draft", lambda *_: _draft(config, root), cache, tokenizer)
    if config.distill.reference_draft:
        report.check(
            "reference draft", lambda found: _reference_draft(config.distill.reference_draft, found, root), target
        )
    report.check("chat template", lambda found: _chat_template(config.draft, found, root), target)
    pair = report.check("parameters", lambda found: _pair(config, found, root), target)
    report.check("family", pair_checks.family, pair)
    report.check("context length", pair_checks.context_length, pair)
    report.check("draft head", lambda found: _draft_head(config, found, root), target)
    prompt = report.check("prompt length", lambda *found: _prompt_length(config, *found), tokenizer, pair)
    others = report.check("other candidates", lambda found: _other_candidates(config, found, root), target)
    for stage in ("generate", "distill", "evaluate"):
        report.check(
            f"memory of {stage}", lambda *found, stage=stage: _memory(config, stage, *found), pair, prompt, others
        )
    _served(report, config, pair, prompt)
    report.check("disk", lambda *found: _disk(config, root, *found), model, pair)
    report.check("time (estimate)", lambda *found: _time(config, *found), pair, prompt)
    for source in config.domain.sources:
        report.check(f"source {source.name}", lambda source=source: _source(source, root))
    report.check("launch", lambda: Passed(check_command(config.launch.distill, root), config.launch.distill))
    report.check("registry", lambda: _registry(config.registry, root))
    if config.diagnose.score:
        siblings = [off_the_shelf(s.name, s.id, s.revision) for s in config.evaluate.siblings]
        _scores(report, config, siblings, root)
    return report


def _served(report: Report, config: Config, pair: Finding, prompt: Finding) -> None:
    """What the draft costs where it is served, and from which acceptance on it pays."""
    lengths = config.evaluate.draft_lengths
    served = (lengths, config.distill.head_tokens, config.decode.draft_half_weights)
    load = report.check("load served", lambda *found: _load(config, *found), pair, prompt)
    report.check("memory of serving", pair_checks.serving_memory, pair, load)
    costs = report.check("cost ratio (estimate)", lambda *found: pair_checks.cost_ratio(*found, *served), pair, load)
    report.check("break-even acceptance", lambda found: pair_checks.break_even(found, lengths), costs)


def _scores(report: Report, config: Config, siblings: list[DraftConfig], root: Path) -> None:
    """How well all that evaluate would compare guesses the stored dev answers: prompt lookup, the draft before distillation,
    `siblings`, and what was distilled already."""
    stored = report.check("stored answers", lambda: _stored_answers(config.target, root))
    report.check("token acceptance of prompt lookup", lambda found: _score_lookup(config, found), stored)
    name = f"token acceptance of {config.draft.name}"
    report.check(name, lambda found: _score(config, config.draft, found, root), stored)
    for sibling in siblings:
        name = f"token acceptance of {sibling.name}"
        report.check(
            name, lambda found, own=sibling: _or_warned(lambda: _score(config, own, found, root), SKIPPED), stored
        )
    if (root / "data" / "draft").is_dir():
        made, replaced = root / "data" / "draft", "none needed: distill replaces it."
        report.check(
            "token acceptance of data/draft",
            lambda found: _or_warned(lambda: _score_distilled(config, made, found), replaced),
            stored,
        )
    if input_path(CHAMPION_FILE).exists():
        name = "token acceptance of the champion"
        report.check(name, lambda found: _or_warned(lambda: _score_champion(config, found, root), SKIPPED), stored)


def run(config: Config) -> None:
    report = diagnose(config, input_path(""))
    print(report.table())
    failed = [finding for finding in report.findings if finding.result == "failed"]
    for finding in failed:
        print(f"{finding.check}: {finding.detail} Remedy: {finding.remedy}", file=sys.stderr)
    if failed:
        raise PipelineError(f"{len(failed)} of {len(report.findings)} checks failed.", "follow the remedies above.")


def _machine() -> Passed:
    facts, device = machine(), default_device()
    accelerator = facts["accelerator"] or "no accelerator"
    dtype = str(resolve_dtype("auto", device)).removeprefix("torch.")
    return Passed(None, f"{facts['processor']}, {facts['threads']} threads, {accelerator}; dtype auto is {dtype}")


def _target(config: ModelConfig, root: Path) -> Target:
    """The target; that its quantisation runs here has a check of its own."""
    target = Target(dataclasses.replace(config, quantization="none"), root)
    target.config = config
    return target


def _draft(config: Config, root: Path) -> Passed:
    target = _target(config.target, root)
    match = check_draft(config.draft, target, root)
    warnings = list(match.warnings)
    if config.draft.init == "pretrained":
        location = resolve_model(config.draft.id, root)
        own = eos_token_ids(load_generation_config(location, config.draft.revision), target.tokenizer)
        if own != target.eos_token_ids:
            warnings.append(f"end-of-answer ids are {own} in the draft: the target's {target.eos_token_ids} are used")
    if undrafted := [index for index in target.eos_token_ids if index not in match.shared_ids]:
        warnings.append(f"the end-of-answer ids {undrafted} are never drafted")
    if config.distill.freeze_embeddings:
        check_frozen_embeddings(config.draft, target, root)
    detail = f"{config.draft.init}, {config.draft.origin}; {len(match.shared_ids)} shared token ids"
    remedy = "none needed: the answers stay the target's." if warnings else ""
    return Passed(target, detail, "; ".join(warnings), remedy)


def _chat_template(config: DraftConfig, target: Target, root: Path) -> Passed:
    """Whether the draft was made for prompts as the target's template renders them."""
    if config.init in ("pruned", "config"):
        return Passed(None, "the target's: this draft brings none")
    if config.init == "champion":
        own = config.registered(root).facts["template"]
    else:
        own = template_fingerprint(load_tokenizer(resolve_model(config.id, root), config.revision))
    if own == target.template:
        return Passed(None, "neither has one" if own == "none" else "both render a user's message alike")
    lacking = {own: "the draft has none", target.template: "the target has none"}
    warning = lacking.get("none", "they render a user's message differently")
    remedy = "distil the draft here: one made under another template guesses worse on chats."
    return Passed(None, "", f"{warning}; the draft sees prompts as the target does", remedy)


def _pair(config: Config, target: Target, root: Path) -> Passed:
    """Both models without weights."""
    whole = footprint.meta_model(target.model_config, config.target.trust_remote_code)
    if config.draft.init == "pruned":
        with torch.device("meta"):
            draft = keep_layers(whole, config.draft.most_layers(whole.config.get_text_config().num_hidden_layers))
    else:
        draft = footprint.meta_model(draft_architecture(config.draft, target, root))
    device = default_device()
    dtypes = (resolve_dtype(name, device) for name in (config.target.dtype, config.draft.dtype))
    pair = footprint.Pair(whole, draft, device, *dtypes, config.target.quantization)
    return Passed(pair, f"target {whole.num_parameters():,}, draft {draft.num_parameters():,}")


def _draft_head(config: Config, target: Target, root: Path) -> Passed:
    check_distillable(config.draft, target, root, config.distill.target_in_loop)
    return Passed(None, "its logits are those of its output head, as distillation needs")


def _optimizer(name: str) -> Passed:
    check_optimizer(name)
    return Passed(None, name)


def _reference_draft(folder: str, target: Target, root: Path) -> Passed:
    check_reference_draft(folder, root)
    check_made_for(root / folder, target)
    return Passed(None, folder)


def _draft_lengths(config: Config) -> Passed:
    lengths = check_draft_lengths(config.decode, config.evaluate)
    return Passed(None, f"{', '.join(map(str, lengths))}, of {config.evaluate.max_new_tokens} tokens decoded")


def _gate(config: Config) -> Passed:
    check_rules(config.gate.checks, list(config.domain.prompts.golden))
    return Passed(None, f"{config.gate.name}, {len(config.gate.checks)} rules")


def _money(config: Config) -> Passed:
    sizes = [1, *config.evaluate.batch_sizes]
    detail = f"sheet {config.roi.name}, at batch {config.roi.batch}"
    if config.roi.batch in sizes:
        return Passed(None, detail)
    warning = f"{detail}, which evaluate does not measure ({', '.join(map(str, sizes))})"
    return Passed(None, "", warning, "set roi.batch to one of them, or add it to evaluate.batch_sizes.")


def _prompt_length(config: Config, tokenizer: Any, pair: footprint.Pair) -> Passed:
    """Tokens of a longest prompt with this tokenizer and template, against the positions of both models."""
    words = config.domain.prompt_words.maximum
    text = " ".join(FILLER[index % len(FILLER)] for index in range(words))
    rows = [{"prompt_id": "a continuation", "text": text, "messages": None}]
    templates = [item for items in config.domain.instructions.values() for item in items]
    for template in templates if config.domain.instruction_share else []:
        messages = [{"role": "user", "content": template.replace("{text}", text)}]
        rows.append({"prompt_id": "an instruction", "text": None, "messages": json.dumps(messages)})
    prompt = max(map(len, encode_prompts(tokenizer, rows, None)))
    new = max(config.generate.max_new_tokens, config.evaluate.max_new_tokens)
    limits = (max_positions(model.config) for model in (pair.target, pair.draft))
    limit = min((limit for limit in limits if limit), default=None)
    if limit and prompt + new > limit:
        raise PipelineError(
            f"Prompts of about {prompt} tokens ({words} words) and {new} new ones exceed {limit} positions.",
            "lower domain.prompt_words.maximum or max_new_tokens of generate and evaluate.",
        )
    return Passed(prompt, f"about {prompt} tokens for {words} words, {new} new ones; {limit or 'unlimited'} positions")


def _other_candidates(config: Config, target: Target, root: Path) -> Passed:
    """Siblings off the shelf and the champion, without weights; evaluate skips what is not to be had."""
    found, missing = {}, []
    for sibling in config.evaluate.siblings:
        try:
            start = off_the_shelf(sibling.name, sibling.id, sibling.revision)
            check_draft(start, target, root)
            found[sibling.name] = footprint.meta_model(draft_architecture(start, target, root))
        except PipelineError as error:
            missing.append(f"{sibling.name}: {error.reason}")
    present = read_champion() is not None  # a file that evaluate would refuse is a failure here
    try:
        if present:
            found["champion"] = footprint.meta_model(_champion(config, root).config)
    except PipelineError as error:
        missing.append(f"champion: {error.reason}")
    detail = ", ".join(f"{name} {model.num_parameters():,}" for name, model in found.items()) or "none"
    return Passed(list(found.values()), detail, "; ".join(missing), "none needed: evaluate skips them." * bool(missing))


def _champion(config: Config, root: Path) -> RegisteredDraft:
    """The version that was promoted last."""
    champion = read_champion()
    uri = f"models:/{champion['model_name']}/{champion['version']}"
    return find_registered(uri, champion["tracking_uri"], config.registry.timeout_seconds, root)


def _memory(config: Config, stage: str, pair: footprint.Pair, prompt: int, others: list[PreTrainedModel]) -> Passed:
    if stage == "generate":
        needs = pair.generate_memory(config.generate.batch_size, prompt + config.generate.max_new_tokens)
        remedy = f"lower generate.batch_size, set target.quantization, {SPREAD}."
    elif stage == "distill":
        positions = prompt + config.distill.on_policy.max_new_tokens
        needs = pair.distill_memory(config.distill, positions)
        remedy = "lower distill.tokens_per_forward or distill.chunk_tokens, or choose a smaller draft."
    else:
        positions = prompt + config.evaluate.max_new_tokens + max(config.evaluate.draft_lengths)
        batch = max([1, *config.evaluate.batch_sizes])
        everywhere = config.evaluate.baselines_everywhere
        needs = pair.evaluate_memory(config.evaluate.tokens_per_forward, positions, batch, others, everywhere)
        remedy = f"lower evaluate.tokens_per_forward or the largest of evaluate.batch_sizes, {SPREAD}."
    return _compare("memory", needs, _free_memory(config, pair), remedy)


def _free_memory(config: Config, pair: footprint.Pair) -> int | None:
    return footprint.free_memory_bytes(pair.device, all_devices=config.target.device_map is not None)


def _load(config: Config, pair: footprint.Pair, prompt: int) -> Passed:
    """What the service does at one time, from the configuration and this run."""
    given = config.diagnose
    new = max(config.generate.max_new_tokens, config.evaluate.max_new_tokens)
    memory = _free_memory(config, pair) if given.memory_gib is None else given.memory_gib * footprint.GIB
    load = pair_checks.Load(given.batch, given.context_tokens or prompt + new, memory)
    return Passed(
        load, f"{load.batch} requests of {load.positions} tokens, decoded together (diagnose.batch, context_tokens)"
    )


def _compare(what: str, needs: dict[str, int], free: int | None, remedy: str) -> Passed:
    """What is needed, by part, against what is free."""
    total = sum(needs.values())
    parts = ", ".join(f"{name} {size_text(amount)}" for name, amount in needs.items() if amount)
    detail = f"about {size_text(total)} ({parts})"
    if free is None:
        return Passed(None, detail, f"free {what} is unknown here", "compare by hand.")
    detail += f"; {size_text(free)} free"
    if total > free:
        raise PipelineError(f"{detail}: too little {what}.", remedy)
    return Passed(None, detail, f"{what} is tight", remedy) if total > TIGHT * free else Passed(None, detail)


def _prompts(config: Config, *splits: str) -> int:
    return sum(sum(getattr(config.domain.prompts, split).values()) for split in splits)


def _disk(config: Config, root: Path, found: tuple, pair: footprint.Pair) -> Passed:
    """Answers and draft lie in data/ and in DVC's cache, answers in .cache/ too, the draft in the registry too."""
    answer_tokens = _prompts(config, "train", "dev", "golden") * config.generate.max_new_tokens
    needs = {
        "answers": 3 * footprint.answer_bytes(answer_tokens, config.generate.top_logprobs),
        "checkpoints": 3 * footprint.checkpoint_bytes(pair.draft.num_parameters()),
        "draft": 3 * footprint.weight_bytes(pair.draft, pair.draft_dtype),
    }
    if not _is_here(found[0]):
        needs["download of the target"] = footprint.weight_bytes(pair.target, pair.target.dtype)
    return _compare("disk", needs, shutil.disk_usage(root).free, "free some disk, or lower domain.prompts.train.")


def _is_here(location: str) -> bool:
    """Whether the weights lie in a folder or in the hub's cache."""
    files = ("model.safetensors", "model.safetensors.index.json")
    return Path(location).is_dir() or any(isinstance(try_to_load_from_cache(location, file), str) for file in files)


def _time(config: Config, pair: footprint.Pair, prompt: int) -> Passed:
    work = footprint.Workload(
        prompts=_prompts(config, "train", "dev", "golden"),
        train_prompts=_prompts(config, "train"),
        prompt_tokens=prompt,
        answer_tokens=config.generate.max_new_tokens,
        rows=config.generate.batch_size,
        decoded_tokens=footprint.decoded_tokens(config.evaluate, config.domain.prompts.golden, config.domain.name),
    )
    stages = pair.seconds(work, config.distill)
    text = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in stages.items())
    return Passed(None, f"at least {text}: matrix products alone, at the speed that this machine has now")


def _duration(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def _source(source: SourceConfig, root: Path) -> Passed:
    if source.reader not in READERS:
        raise PipelineError(f"Reader {source.reader!r} is unknown.", f"choose one of {', '.join(READERS)}.")
    if source.reader != "hub":
        return Passed(None, f"{source.path}: {len(find_files(source.path, root))} found")
    if source.split is None:
        raise PipelineError(f"It names no split of {source.path}.", "add `split: train` to the source.")
    return Passed(None, f"{source.path} on the hub, split {source.split}: not looked up")


def _stored_answers(config: ModelConfig, root: Path) -> Passed:
    stored = read_stored_answers(_target(config, root), root / "data" / "answers")
    return Passed(stored, f"{len(stored.dev)} of dev, {len(stored.train)} of train for the trimmed head")


def _score(config: Config, candidate: DraftConfig, stored: StoredAnswers, root: Path) -> Passed:
    found = score_start(candidate, stored, _scoring(config), root)
    loaded = "; the target's weights were loaded, since it starts from them" * takes_weights_of_target(candidate)
    return Passed(None, f"before distillation, {_scored(config, found)}{loaded}")


def _score_distilled(config: Config, folder: Path, stored: StoredAnswers) -> Passed:
    return Passed(None, _scored(config, score_distilled(folder, stored, _scoring(config))))


def _score_champion(config: Config, stored: StoredAnswers, root: Path) -> Passed:
    return _score_distilled(config, _champion(config, root).folder(root), stored)


def _score_lookup(config: Config, stored: StoredAnswers) -> Passed:
    """Its copies are compared with answers, not with probabilities, which are there for greedy ones."""
    found = score_lookup(stored, config.evaluate.lookup_ngram, config.evaluate.bootstrap_samples)
    shares = [f"{domain} {measured(metrics[TOKEN_ACCEPTANCE], 'share')}" for domain, metrics in found.items()]
    return Passed(None, f"greedy: {', '.join(shares)}")


def _or_warned(score: Callable[[], Passed], remedy: str) -> Passed:
    """A draft that the pipeline does without is no failure where it is not to be had."""
    try:
        return score()
    except PipelineError as error:
        return Passed(None, "", error.reason, remedy)


def _scoring(config: Config) -> Scoring:
    return Scoring(
        config.decode.sampling,
        config.distill.head_tokens,
        config.decode.draft_half_weights,
        config.evaluate.tokens_per_forward,
        config.evaluate.bootstrap_samples,
    )


def _scored(config: Config, found: dict[str, dict[str, dict]]) -> str:
    shares = [f"{domain} {measured(metrics[TOKEN_ACCEPTANCE], 'share')}" for domain, metrics in found.items()]
    whole = measured(found["all"]["token_acceptance_full_head"], "share")
    how = "greedy"
    if not config.decode.sampling.greedy:
        how = f"at temperature {config.decode.temperature:g} (estimated from the probabilities that are stored)"
    return f"{how}: {', '.join(shares)}; all with the full head {whole}"


def _registry(config: RegistryConfig, root: Path) -> Passed:
    from pipeline.adapters.mlflow_registry import MlflowStore
    from pipeline.adapters.mlflow_store import check_store, resolve_tracking_uri

    uri = resolve_tracking_uri(config.tracking_uri, root)
    check_store(uri, config.timeout_seconds)
    check_receipt(MlflowStore(uri))
    return Passed(None, f"the MLflow store answers ({urlparse(uri).hostname or uri})")


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg):
    execute(run, Config, cfg)


if __name__ == "__main__":
    main()
