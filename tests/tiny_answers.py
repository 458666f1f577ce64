"""Greedy answers of a tiny target with its stored probabilities, computed without any of the code under test."""

from __future__ import annotations

import numpy as np
import torch

from pipeline.core.answers import Answer
from pipeline.core.sampling import Sampling


@torch.inference_mode()
def answer_of(target, prompt: list[int], tokens: int, name: str, top: int = 10) -> Answer:
    ids = list(prompt)
    scores = target(torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1).topk(top)
    values, index = [], []
    for _ in range(tokens):
        best = target(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1).topk(top)
        values.append(best.values.numpy())
        index.append(best.indices.numpy().astype(np.int32))
        ids.append(int(best.indices[0]))
    own = np.array([row[0] for row in values], dtype=np.float32)
    return Answer(
        name, "legal", "continuation", name, np.array(prompt, np.int32), np.array(ids[len(prompt) :], np.int32),
        "length", Sampling(), 0, own, np.stack(index), np.stack(values), scores.indices.numpy().astype(np.int32),
        scores.values.numpy(),
    )  # fmt: skip


def answers_of(target, count: int, top: int = 10) -> list[Answer]:
    """Answers of three to seven tokens to random prompts of two to eight."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 100, size=rng.integers(2, 9)).tolist() for _ in range(count)]
    return [answer_of(target, prompt, 3 + index % 5, f"p{index}", top) for index, prompt in enumerate(prompts)]
