"""Folders with tiny models, answers and a registry, in which stages can run."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from tiny_models import tiny_llama
from tqdm import tqdm
from transformers import GenerationConfig

from pipeline import distill, stage
from pipeline.adapters.answer_files import write_answers
from pipeline.adapters.drafts import (
    DraftConfig,
    initial_draft,
    read_draft_facts,
    save_draft,
)
from pipeline.adapters.mlflow_registry import MlflowStore
from pipeline.adapters.mlflow_store import check_store
from pipeline.adapters.targets import Target
from pipeline.core.answers import Answer
from pipeline.core.decoding import DecodeConfig
from pipeline.core.generation import EncodedPrompt, generate_answers
from pipeline.core.models import ModelConfig
from pipeline.core.tiny import build_tiny_tokenizer

REAL = 259  # ids of the tokenizer; a model's rows beyond them are padding
ARCHITECTURE = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


@dataclass
class Project:
    """A folder with models and answers, and a registry that it shares with others."""

    root: Path
    target: Target
    sibling_rows: int
    tied: bool
    answers: list[Answer]
    store: MlflowStore

    @property
    def champion(self) -> str:
        return f"champion-of-{self.root.name}"

    def start(self, init: str) -> DraftConfig:
        """A draft of float32 weights that starts in the way `init`."""
        options = {
            "pruned": {"keep_layers": [0, 3]},
            "pretrained": {"id": "models/sibling"},
            "config": {"id": "models/architecture.json"},
            "champion": {"id": f"models:/{self.champion}@champion", "tracking_uri": self.store.uri},
        }
        return DraftConfig(name="d", init=init, dtype="float32", **options[init])

    def distilled(self, start: DraftConfig) -> Path:
        """The folder of the draft that the distill stage makes of `start`, with the smoke run's recipe."""
        smoke = smoke_config()
        recipe = replace(smoke.distill, epochs=3, evaluations=1)
        distill.run(replace(smoke, target=self.target.config, draft=start, distill=recipe))
        return self.root / "data" / "draft"


def smoke_config() -> distill.Config:
    with initialize_config_dir(stage.CONF_DIR, version_base="1.3"):
        return stage.typed_config(compose("config", overrides=["experiment=smoke"]), distill.Config)


def save_model(folder: Path, rows: int, layers: int, seed: int, tied: bool) -> None:
    """A model whose padding rows win every argmax, beside the tiny tokenizer."""
    model = tiny_llama(seed, std=0.1, vocabulary=rows, num_hidden_layers=layers, tie_word_embeddings=tied)
    model.generation_config = GenerationConfig(eos_token_id=[0, 2], pad_token_id=0)
    with torch.no_grad():
        model.lm_head.weight[REAL:] = 50 * torch.randn(rows - REAL, 64)
    model.save_pretrained(folder)
    build_tiny_tokenizer().save_pretrained(folder)


def answered(target: Target) -> list[Answer]:
    prompts = np.random.default_rng(0).integers(3, REAL, size=(16, 6)).tolist()
    encoded = [EncodedPrompt(f"p{index}", "legal", "continuation", "c", ids) for index, ids in enumerate(prompts)]
    config = DecodeConfig(1, 8, allowed_token_ids=range(target.vocabulary_size), return_logprobs=8, prompt_logprobs=8)
    return list(generate_answers(target.model, encoded, config, slots=16, seed=0, progress=tqdm(disable=True)))


def fresh_registry(folder: Path) -> MlflowStore:
    uri = f"sqlite:///{folder}/mlflow.db"
    check_store(uri, timeout_seconds=5)
    return MlflowStore(uri)


def build_project(root: Path, target_rows: int, sibling_rows: int, tied: bool, store: MlflowStore) -> Project:
    save_model(root / "models" / "target", target_rows, layers=4, seed=0, tied=tied)
    save_model(root / "models" / "sibling", sibling_rows, layers=2, seed=1, tied=tied)
    architecture = {**ARCHITECTURE, "tie_word_embeddings": tied}
    (root / "models" / "architecture.json").write_text(json.dumps(architecture), encoding="utf-8")
    target = Target(ModelConfig(name="t", id="models/target", dtype="float32"), root)
    answers = answered(target)
    facts = {**target.facts, **smoke_config().generate.facts, "target_domain": "legal"}
    for split, rows in (("train", answers), ("dev", answers[:4])):
        write_answers(root / "data" / "answers" / split / "00000.parquet", rows, facts)
    project = Project(root, target, sibling_rows, tied, answers, store)
    register(project, initial_draft(project.start("pretrained"), target, root))
    return project


def register(project: Project, draft) -> str:
    """Save `draft`, register it and let the alias champion name it; returns the version."""
    folder = project.root / "registered"
    save_draft(folder, draft, project.target, [0, 2, 5], project.start("pretrained"))
    tags = {"fingerprint": read_draft_facts(folder)["fingerprint"]}
    with project.store.run("drafts", "r", {}) as run_id:
        version = project.store.register_version(run_id, project.champion, folder, [], "# card\n", "float32", tags)
    project.store.set_alias(project.champion, "champion", version)
    shutil.rmtree(folder)
    return version
