"""diagnose: would this run work here, and what would it take?

Reads:  the configuration; configs and tokenizers of target and draft, but no weights.
Writes: nothing; prints one line per check.
Does:   checks the models, the pair, the sources and the registry, and compares the memory and disk that the stages need
        with what is free. All failures are shown, not only the first; any makes the exit code 1.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse

import hydra
import torch
from huggingface_hub import try_to_load_from_cache

from pipeline.adapters.drafts import (
    DraftConfig,
    check_distillable,
    check_draft,
    check_frozen_embeddings,
    draft_architecture,
)
from pipeline.adapters.model_sources import resolve_model
from pipeline.adapters.processes import LaunchConfig, check_command
from pipeline.adapters.quantization import quantization_config
from pipeline.adapters.sources import READERS, SourceConfig, find_files
from pipeline.adapters.targets import Target
from pipeline.core import footprint
from pipeline.core.cache import layer_types
from pipeline.core.comparison import machine
from pipeline.core.errors import PipelineError
from pipeline.core.evaluation_settings import DecodeSettings, EvaluateConfig
from pipeline.core.models import (
    ModelConfig,
    default_device,
    eos_token_ids,
    load_config,
    load_generation_config,
    load_tokenizer,
    max_positions,
    resolve_dtype,
)
from pipeline.core.pruning import keep_layers
from pipeline.core.templates import encode_prompts
from pipeline.core.training import DistillConfig
from pipeline.gate import GateConfig
from pipeline.generate import GenerateConfig
from pipeline.prepare import DomainConfig
from pipeline.register import RegistryConfig, check_receipt
from pipeline.stage import execute, input_path

GIB = 1 << 30
SPREAD = (
    "spread the target over devices (target.device_map=auto, or tensor parallelism where one's own code loads it), or"
    " evaluate through the serving engine"
)
TIGHT = 0.85  # share of what is free from which on a need is worth a warning
FILLER = "the Licensee shall not assign or transfer this Agreement without the written consent of the Licensor".split()


NOT_APPLIED = {  # settings of a generation config that change which tokens are allowed, with the values that mean "off"
    "repetition_penalty": (1.0,), "no_repeat_ngram_size": (0,), "bad_words_ids": (), "min_new_tokens": (0,),
    "min_length": (0,), "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "forced_bos_token_id": (),
    "sequence_bias": (), "exponential_decay_length_penalty": (),
}  # fmt: skip


@dataclass
class Config:
    target: ModelConfig
    draft: DraftConfig
    domain: DomainConfig
    generate: GenerateConfig
    distill: DistillConfig
    decode: DecodeSettings  # this and the gate are only checked for their types and ranges
    evaluate: EvaluateConfig
    gate: GateConfig
    registry: RegistryConfig
    launch: LaunchConfig


class Passed(NamedTuple):
    """What a check found that did not fail; with a `warning` it is reported as one."""

    value: Any  # for the checks that build on this one
    detail: str
    warning: str = ""
    remedy: str = ""


@dataclass
class Finding:
    check: str
    result: str  # ok | warning | failed | not run
    detail: str
    remedy: str
    value: Any = None


@dataclass
class Report:
    """Findings in the order of the checks."""

    findings: list[Finding] = dataclasses.field(default_factory=list)

    def check(self, name: str, function: Callable[..., Passed], *needs: Finding) -> Finding:
        """Note what `function` says about the values of `needs`, or that it cannot run without one of them."""
        missing = [need.check for need in needs if need.result in ("failed", "not run")]
        if missing:
            finding = Finding(name, "not run", f"needs: {', '.join(missing)}", "")
        else:
            try:
                value, detail, warning, remedy = function(*(need.value for need in needs))
            except PipelineError as error:
                finding = Finding(name, "failed", error.reason, error.remedy)
            else:
                text = "; ".join(filter(None, (detail, warning)))
                finding = Finding(name, "warning" if warning else "ok", text, remedy, value)
        self.findings.append(finding)
        return finding

    def table(self) -> str:
        """Check, result and detail of each finding, the remedy below it."""
        names = max(len(finding.check) for finding in self.findings)
        room = max(40, shutil.get_terminal_size((120, 24)).columns - names - 11)
        lines = []
        for finding in self.findings:
            texts = [finding.detail, finding.remedy and f"-> {finding.remedy}"]
            cells = [line for text in texts for line in textwrap.wrap(text, room, break_on_hyphens=False)]
            lines.append(f"{finding.check:{names}}  {finding.result:7}  {cells[0]}")
            lines += [" " * (names + 11) + cell for cell in cells[1:]]
        return "\n".join(lines)


def diagnose(config: Config, root: Path) -> Report:
    """Run every check that can run."""
    report = Report()
    report.check("machine", _machine)
    model = report.check("target configuration", lambda: _configuration(config.target, root))
    cache = report.check("target cache", _cache, model)
    tokenizer = report.check("target tokenizer", lambda found: _tokenizer(config.target, *found), model)
    report.check("end of answers", lambda *found: _end_of_answers(config.target, *found), model, tokenizer)
    report.check("generation rules", lambda found: _generation_rules(config.target, found), model)
    report.check("target quantization", lambda: _quantization(config.target))
    target = report.check("draft", lambda *_: _draft(config, root), cache, tokenizer)
    pair = report.check("parameters", lambda found: _pair(config, found, root), target)
    report.check("draft head", lambda found: _draft_head(config, found, root), target)
    prompt = report.check("prompt length", lambda *found: _prompt_length(config, *found), tokenizer, pair)
    for stage in ("generate", "distill", "evaluate"):
        report.check(f"memory of {stage}", lambda *found, stage=stage: _memory(config, stage, *found), pair, prompt)
    report.check("disk", lambda *found: _disk(config, root, *found), model, pair)
    report.check("time (estimate)", lambda *found: _time(config, *found), pair, prompt)
    for source in config.domain.sources:
        report.check(f"source {source.name}", lambda source=source: _source(source, root))
    report.check("launch", lambda: Passed(check_command(config.launch.distill, root), config.launch.distill))
    report.check("registry", lambda: _registry(config.registry, root))
    return report


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


def _configuration(config: ModelConfig, root: Path) -> Passed:
    location = resolve_model(config.id, root)
    found = load_config(location, config.revision, config.trust_remote_code)
    text = found.get_text_config()
    layers = getattr(text, "num_hidden_layers", "?")
    return Passed((location, found), f"{config.id}: {text.model_type}, {layers} layers of width {text.hidden_size}")


def _cache(found: tuple) -> Passed:
    counts = Counter(layer_types(found[1]))
    kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items()))
    return Passed(None, f"{kinds}: can be rolled back by position")


def _tokenizer(config: ModelConfig, location: str, found: Any) -> Passed:
    tokenizer = load_tokenizer(location, config.revision, config.trust_remote_code)
    rows, size = found.get_text_config().vocab_size, len(tokenizer)
    detail = f"{size} tokens, {rows} embedding rows"
    warning = ""
    if size < rows:
        detail += f", of which the last {rows - size} are padding and never emitted"
    elif size > rows:
        warning = f"{size - rows} tokens have no embedding row and must not occur in prompts"
    if max(tokenizer.get_vocab().values()) >= size:
        warning = f"its ids have holes, so real tokens from id {size} on are taken for padding"
    return Passed(tokenizer, detail, warning, warning and "check that tokenizer and model belong together.")


def _end_of_answers(config: ModelConfig, found: tuple, tokenizer: Any) -> Passed:
    location, model_config = found
    ids = eos_token_ids(load_generation_config(location, config.revision), tokenizer)
    real = min(len(tokenizer), model_config.get_text_config().vocab_size)
    if beyond := [index for index in ids if index >= real]:
        raise PipelineError(
            f"The end-of-answer ids {beyond} lie beyond the {real} real tokens: no answer would end.",
            "correct eos_token_id in the target's generation_config.json.",
        )
    if not ids:
        return Passed(ids, "no token ends an answer", "all run to max_new_tokens", "give the target an eos_token_id.")
    detail = ", ".join(f"{index} {tokenizer.convert_ids_to_tokens(index)!r}" for index in ids)
    if tokenizer.eos_token_id in (None, *ids):
        return Passed(ids, detail)
    warning = f"the tokenizer's own, {tokenizer.eos_token!r}, is not among them"
    return Passed(ids, detail, warning, "check eos_token_id in the target's generation_config.json.")


def _generation_rules(config: ModelConfig, found: tuple) -> Passed:
    """Rules of the target's generation config that answers and measurements do without (D09: never ignored silently)."""
    settings = load_generation_config(found[0], config.revision)
    rules = {name: getattr(settings, name, None) for name in NOT_APPLIED}
    rules = {name: value for name, value in rules.items() if value not in (None, *NOT_APPLIED[name])}
    if not rules:
        return Passed(None, "none beyond sampling")
    named = ", ".join(f"{name}={value}" for name, value in rules.items())
    remedy = "serve without them, or expect lower acceptance in production than is measured here."
    return Passed(None, "", f"generation_config.json asks for {named}, which answers here are made without", remedy)


def _quantization(config: ModelConfig) -> Passed:
    quantized = quantization_config(config) is not None
    return Passed(None, f"{config.quantization}: bitsandbytes runs here" if quantized else "none")


def _draft(config: Config, root: Path) -> Passed:
    target = Target(dataclasses.replace(config.target, quantization="none"), root)
    if config.draft.init == "champion":
        target.config = config.target  # the quantisation is part of the key; that it runs has a check of its own
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


def _memory(config: Config, stage: str, pair: footprint.Pair, prompt: int) -> Passed:
    if stage == "generate":
        needs = pair.generate_memory(config.generate.batch_size, prompt + config.generate.max_new_tokens)
        remedy = f"lower generate.batch_size, set target.quantization, {SPREAD}."
    elif stage == "distill":
        positions = prompt + config.distill.on_policy.max_new_tokens
        needs = pair.distill_memory(config.distill, positions)
        remedy = "lower distill.tokens_per_forward or distill.chunk_tokens, or choose a smaller draft."
    else:
        positions = prompt + config.evaluate.max_new_tokens + max(config.evaluate.draft_lengths)
        needs = pair.evaluate_memory(config.evaluate.tokens_per_forward, positions)
        remedy = f"lower evaluate.tokens_per_forward, {SPREAD}."
    free = footprint.free_memory_bytes(pair.device, all_devices=config.target.device_map is not None)
    return _compare("memory", needs, free, remedy)


def _compare(what: str, needs: dict[str, int], free: int | None, remedy: str) -> Passed:
    """What is needed, by part, against what is free."""
    total = sum(needs.values())
    parts = ", ".join(f"{name} {_size(amount)}" for name, amount in needs.items() if amount)
    detail = f"about {_size(total)} ({parts})"
    if free is None:
        return Passed(None, detail, f"free {what} is unknown here", "compare by hand.")
    detail += f"; {_size(free)} free"
    if total > free:
        raise PipelineError(f"{detail}: too little {what}.", remedy)
    return Passed(None, detail, f"{what} is tight", remedy) if total > TIGHT * free else Passed(None, detail)


def _size(amount: float) -> str:
    return f"{amount / GIB:.1f} GiB" if amount >= 0.1 * GIB else f"{amount / (1 << 20):.1f} MiB"


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
