"""generate: the target answers the prompts.

Reads:  data/prompts/{train,dev,golden}.parquet, the target.
Writes: data/answers/{train,dev,golden}/*.parquet: ids of prompt and answer, settings, and the target's top
        log-probabilities aligned with the answer ids.
Does:   answers a share of the train prompts by sampling, all others greedily. Finished shards survive a kill and are
        not generated again; all are kept until another run has finished, so that one which repeats this one answers nothing.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig
from tqdm import tqdm

from pipeline.adapters.answer_files import read_shard, write_answers
from pipeline.adapters.targets import Target
from pipeline.core.answers import Answer, GenerateConfig
from pipeline.core.artifacts import atomic_path, fingerprint, fingerprint_files, read_json
from pipeline.core.decoding import DecodeConfig
from pipeline.core.errors import PipelineError
from pipeline.core.finished import discard_finished, finished_beside, is_finished, mark_finished
from pipeline.core.generation import EncodedPrompt, generate_answers, prompt_seed
from pipeline.core.models import ModelConfig, default_device, resolve_dtype
from pipeline.core.sampling import Sampling
from pipeline.core.templates import encode_prompts
from pipeline.stage import alone, cache_path, code_fingerprint, execute, input_path, output_path, write_effective_config

SPLITS = ("train", "dev", "golden")


@dataclass
class Config:
    target: ModelConfig
    generate: GenerateConfig
    seed: int = field(default=0)


def run(config: Config) -> None:
    target = Target(config.target, input_path(""))
    if config.generate.top_logprobs > target.vocabulary_size:
        raise PipelineError(
            f"generate.top_logprobs is {config.generate.top_logprobs}, the target has {target.vocabulary_size} tokens.",
            "lower it; 20 is plenty.",
        )
    files = {split: input_path(f"data/prompts/{split}.parquet") for split in SPLITS}
    prompts = {split: _read_prompts(path, target, config) for split, path in files.items()}
    facts = {
        **target.facts,
        "computed_in": str(resolve_dtype(config.target.dtype, default_device())),
        "prompts": fingerprint_files(list(files.values())),
        "target_domain": read_json(input_path("data/prompts/stats.json"), "domain-draft/prompts", 1)["target_domain"],
        **config.generate.facts,
        "seed": config.seed,
    }
    cache, code = cache_path("generate", fingerprint(facts)), code_fingerprint("generate")
    with alone("generate", cache.name):
        if not is_finished(cache, code):
            discard_finished(cache)  # other code's
        answers = _answer_all(target, prompts, config, cache, facts)
        _write(answers, prompts, config, facts)
        if not is_finished(cache, code):
            mark_finished(cache, code)
        for other in finished_beside(cache):
            with suppress(PipelineError), alone("generate", other.name):
                discard_finished(other)


def _write(
    answers: dict[str, Answer], prompts: dict[str, list[EncodedPrompt]], config: Config, facts: dict[str, Any]
) -> None:
    with atomic_path(output_path("data/answers")) as folder:
        for split in SPLITS:
            rows = [answers[prompt.prompt_id] for prompt in prompts[split]]
            for number, start in enumerate(range(0, len(rows), config.generate.shard_rows)):
                shard = rows[start : start + config.generate.shard_rows]
                write_answers(folder / split / f"{number:05d}.parquet", shard, facts)
        write_effective_config(folder, config)


def _read_prompts(path: Path, target: Target, config: Config) -> list[EncodedPrompt]:
    try:
        rows = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise PipelineError(f"{path} cannot be read ({error}).", "run `dvc repro prepare`.") from None
    limit = target.max_positions and target.max_positions - config.generate.max_new_tokens
    encoded = encode_prompts(target.tokenizer, rows, limit)
    return [
        EncodedPrompt(row["prompt_id"], row["domain"], row["task"], row["cluster"], ids)
        for row, ids in zip(rows, encoded, strict=True)
    ]


def _answer_all(
    target: Target, prompts: dict[str, list[EncodedPrompt]], config: Config, cache: Path, facts: dict
) -> dict[str, Answer]:
    """Answer what the cache lacks, in shards that are whole once they have their name; answers by prompt id."""
    settings = config.generate
    answers = {answer.prompt_id: answer for path in sorted(cache.glob("*.parquet")) for answer in _kept_shard(path)}
    sampled = {prompt.prompt_id for prompt in prompts["train"] if _is_sampled(prompt, config)}
    waiting = [prompt for rows in prompts.values() for prompt in rows if prompt.prompt_id not in answers]
    if not waiting:
        print(f"generate: every prompt is answered already; the answers are kept in {cache}.")
        return answers
    total = len(waiting) * settings.max_new_tokens
    fresh: list[Answer] = []
    with tqdm(total=total, desc="generate (at most)", unit=" tokens", unit_scale=True, mininterval=2) as progress:
        for sampling in (Sampling(), settings.sampling):
            chosen = [prompt for prompt in waiting if (prompt.prompt_id in sampled) != sampling.greedy]
            if not chosen:
                continue
            decode_config = DecodeConfig(
                draft_length=1,
                max_new_tokens=settings.max_new_tokens,
                eos_token_ids=target.eos_token_ids,
                allowed_token_ids=range(target.vocabulary_size),
                return_logprobs=settings.top_logprobs,
                prompt_logprobs=settings.top_logprobs,
                **vars(sampling),
            )
            model, slots = target.model, settings.batch_size
            for answer in generate_answers(model, chosen, decode_config, slots, config.seed, progress):
                fresh.append(answer)
                answers[answer.prompt_id] = answer
                if len(fresh) % settings.shard_rows == 0:
                    _save_progress(cache, fresh[-settings.shard_rows :], facts)
    if rest := len(fresh) % settings.shard_rows:
        _save_progress(cache, fresh[-rest:], facts)
    return answers


def _kept_shard(path: Path) -> list[Answer]:
    """The answers of a shard that an earlier run kept; one that is damaged is dropped, and answered again."""
    try:
        return read_shard(path)
    except PipelineError:
        path.unlink(missing_ok=True)
        return []


def _is_sampled(prompt: EncodedPrompt, config: Config) -> bool:
    return (prompt_seed(config.seed, prompt.prompt_id) % 10_000) / 10_000 < config.generate.sampled_share


def _save_progress(cache: Path, answers: list[Answer], facts: dict) -> None:
    numbers = [int(path.stem) for path in cache.glob("*.parquet")]
    write_answers(cache / f"{max(numbers, default=-1) + 1:05d}.parquet", answers, facts)


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> None:
    execute(run, Config, cfg)


if __name__ == "__main__":
    main()
