"""Where a domain draft pays and where it does not: by domain against a generic draft, by temperature, on free writing.

Called by the domains and limits tables of benchmarks/distill.py. Golden prompts play no part: dev prompts stand in for them.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from omegaconf import OmegaConf
from tqdm import tqdm

from pipeline import stage
from pipeline.adapters.targets import Target
from pipeline.core.answers import Answer
from pipeline.core.comparison import evaluate
from pipeline.core.decoding import DecodeConfig
from pipeline.core.evaluation_settings import DISTILLED, Contestants, DecodeSettings, EvaluateConfig
from pipeline.core.gating import PROMPTS, judge
from pipeline.core.generation import EncodedPrompt, generate_answers
from pipeline.core.templates import encode_prompts
from pipeline.evaluate import Config as EvaluateStage
from pipeline.gate import Config as GateStage

CREATIVE = "creative"
CREATIVE_PROMPTS = [
    f"{form} about {subject}."
    for form in ("Write a short story", "Write a poem", "Invent a dialogue", "Write the opening of a novel")
    for subject in ("a lighthouse", "two rivals who must share a boat", "the last tree in a city", "a forgotten song")
]
NOT_TIMED = {
    "timed_prompts_other": 0, "baseline_prompts": 0, "reference_prompts": 0, "lossless_prompts": 2, "batch_prompts": 0,
    "temperature_prompts": 0,
}  # fmt: skip


def creative_answers(target: Target, new_tokens: int, slots: int, seed: int) -> list[Answer]:
    """The target's greedy answers to `CREATIVE_PROMPTS`."""
    names = [f"{CREATIVE}-{index}" for index in range(len(CREATIVE_PROMPTS))]
    rows = [
        {"prompt_id": name, "text": None, "messages": json.dumps([{"role": "user", "content": text}])}
        for name, text in zip(names, CREATIVE_PROMPTS, strict=True)
    ]
    encoded = encode_prompts(target.tokenizer, rows, None)
    prompts = [
        EncodedPrompt(name, CREATIVE, "instruction", name, ids) for name, ids in zip(names, encoded, strict=True)
    ]
    config = DecodeConfig(
        draft_length=1,
        max_new_tokens=new_tokens,
        eos_token_ids=target.eos_token_ids,
        allowed_token_ids=range(target.vocabulary_size),
        return_logprobs=1,
        prompt_logprobs=1,
    )
    with tqdm(total=len(prompts) * new_tokens, desc="creative answers", unit=" tokens") as progress:
        return list(generate_answers(target.model, prompts, config, slots, seed, progress))


def judged(models: Contestants, answers: list[Answer], domain: str, temperature: float, prompts: int) -> dict[str, Any]:
    """What the evaluation finds on `answers` of `domain` at `temperature`, and what the default gate says to it."""
    values = OmegaConf.load(stage.input_path("params.yaml"))
    own_domain = values.domain.name
    gate, defaults = (stage.typed_config(values, schema) for schema in (GateStage, EvaluateStage))
    checks = [
        dataclasses.replace(check, domain=domain) if check.domain == own_domain else check
        for check in gate.gate.checks
        if check.metric != PROMPTS  # here `prompts` of them are enough
    ]
    settings: DecodeSettings = dataclasses.replace(defaults.decode, temperature=temperature)
    config: EvaluateConfig = dataclasses.replace(defaults.evaluate, timed_prompts=prompts, **NOT_TIMED)
    own = [answer for answer in answers if answer.domain == domain]
    contestants = dataclasses.replace(models, domain=domain)
    metrics = evaluate(contestants, own, own, settings, config, defaults.seed).metrics
    found = metrics["candidates"][DISTILLED][domain]
    verdict = judge(metrics, checks)
    speedup = found["speedup"]
    return {
        "draft_length": metrics["settings"]["draft_length"],
        "token_acceptance": found["token_acceptance_trimmed_head"]["value"],
        "token_acceptance_full_head": found["token_acceptance_full_head"]["value"],
        "acceptance_rate": found["acceptance_rate"]["value"],
        "speedup": speedup["value"],
        "speedup_lower": speedup["interval"][0],
        "gate": "passed" if verdict["passed"] else "refused",
        "failed_checks": ", ".join(
            check["metric"] for check in verdict["checks"] if not check["passed"] and check["severity"] == "fail"
        ),
    }
