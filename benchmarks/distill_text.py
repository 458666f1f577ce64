"""The documents themselves as data to distil on, in the place of the target's answers to prompts cut out of them.

Called by the recipes table of benchmarks/distill.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from distill_storage import reform, scored_tokens, top_form
from omegaconf import OmegaConf
from tqdm import tqdm

from pipeline import stage
from pipeline.adapters.sources import read_documents
from pipeline.adapters.targets import Target
from pipeline.core.answers import Answer
from pipeline.core.artifacts import fingerprint
from pipeline.core.sampling import Sampling
from pipeline.prepare import Config as PrepareStage


def scored_text(target: Target, answers: list[Answer], prompts: Path) -> list[Answer]:
    """Passages of the documents that `prompts` (a Parquet file) were cut out of, with the target's top log-probabilities.

    As many scored tokens as `answers` have with their prompts, in passages of their mean length; stored as prompts that
    were answered with one token.
    """
    config = stage.typed_config(OmegaConf.load(stage.input_path("params.yaml")), PrepareStage)
    used = set(pq.read_table(prompts, columns=["document_id"])["document_id"].to_pylist())
    documents = read_documents(config.domain.sources, stage.input_path(""))
    texts = {document.document_id: document.text for document in documents if document.document_id in used}
    wanted, entries = scored_tokens(answers), answers[0].top_ids.shape[-1]
    length = 1 + wanted // len(answers)
    passages = [passage for name, text in texts.items() for passage in _passages(target, name, text, length)]
    passages.sort(key=lambda item: fingerprint(item.prompt_id))
    chosen = passages[: wanted // (length - 1)]
    bar = tqdm(chosen, desc="text scored", unit=" passages")
    return [reform(target.model, passage, target.vocabulary_size, top_form(entries)) for passage in bar]


def _passages(target: Target, name: str, text: str, length: int) -> Iterator[Answer]:
    """Pieces of `length` tokens, without log-probabilities yet."""
    ids = np.asarray(target.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    for start in range(0, len(ids) - length + 1, length):
        piece = ids[start : start + length]
        nothing = np.zeros((length - 2, 0), dtype=np.int32)
        yield Answer(
            prompt_id=f"{name}#{start}",
            domain="",
            task="text",
            cluster=name,
            prompt_ids=piece[:-1],
            answer_ids=piece[-1:],
            finish_reason="length",
            sampling=Sampling(),
            seed=0,
            logprobs=np.zeros(1, dtype=np.float32),
            top_ids=nothing[:1],
            top_logprobs=nothing[:1].astype(np.float32),
            prompt_top_ids=nothing,
            prompt_top_logprobs=nothing.astype(np.float32),
        )
