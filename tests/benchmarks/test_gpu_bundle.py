"""The bundle holds what the GPU benchmark loads; prompts are cut answers of the dev set."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from script import load

from pipeline import stage
from pipeline.core.answers import Answer
from pipeline.core.errors import PipelineError
from pipeline.core.pruning import keep_layers
from pipeline.core.sampling import Sampling
from pipeline.core.tiny import build_tiny_target

gpu_bundle = load("gpu_bundle")
gpu_twins = load("gpu_twins")

SPLITS = gpu_twins.SplitPrompts(
    "legal", [gpu_twins.EncodedPrompt("a", "legal", "continuation", "c", [6])], [], range(259), (0, 2)
)


def answer(prompt: int, ids: list[int], finish_reason: str = "length", domain: str = "legal") -> Answer:
    top = np.zeros((len(ids), 1), dtype=np.int32)
    score = top.astype(np.float32)
    prompt_top, prompt_score = (np.zeros((prompt - 1, 1), dtype=kind) for kind in (np.int32, np.float32))
    return Answer(
        "id", domain, "continuation", "cluster", np.arange(prompt), np.array(ids), finish_reason, Sampling(), 0,
        score[:, 0], top, score, prompt_top, prompt_score,
    )  # fmt: skip


def test_prompts_are_cut_answers_that_do_not_repeat_themselves():
    fresh, loop = list(range(300, 400)), [7] * 150
    answers = [
        answer(50, loop),
        answer(60, fresh),
        answer(150, fresh),
        answer(9, fresh, "eos"),
        answer(9, fresh, domain="code"),
    ]
    prompts = gpu_bundle.dev_prompts(answers, "legal")
    assert [len(prompt) for prompt in prompts] == [200, 160, 200]
    assert prompts[0] == [*range(150), *fresh[:50]] and prompts[2][-1] == 7
    with pytest.raises(PipelineError, match="Remedy"):
        gpu_bundle.dev_prompts(answers[3:], "legal")


def test_all_prompts_travel_as_ids_and_compactly(tmp_path):
    splits = {"train": [answer(50, [7])] * 40, "dev": [answer(9, [8], domain="code")]}
    target = SimpleNamespace(vocabulary_size=259, eos_token_ids=(0, 2))
    prompts = gpu_bundle.split_prompts(splits, "legal", target)
    assert prompts.train[0].token_ids == list(range(50)) and prompts.dev[0].domain == "code"
    assert (prompts.vocabulary, prompts.eos_token_ids) == (range(259), (0, 2))
    models = build_tiny_target(), build_tiny_target()
    gpu_bundle.write_bundle(tmp_path / "bundle", *models, [1], [[2]], prompts)
    assert (tmp_path / "bundle" / gpu_twins.SPLITS_FILE).stat().st_size < 40 * (50 * 3 + 100) + 300


def test_what_is_written_is_what_the_benchmark_loads(tmp_path):
    target = build_tiny_target()
    draft = keep_layers(target, [0, 3])
    gpu_bundle.write_bundle(tmp_path / "bundle", target, draft, [1, 2, 3], [[4, 5]], SPLITS)
    loaded_target, loaded_draft, head, prompts = gpu_twins.load_bundle(tmp_path / "bundle")
    assert (head, prompts) == ([1, 2, 3], [[4, 5]])
    assert gpu_twins.load_splits(tmp_path / "bundle") == SPLITS
    for loaded, written in ((loaded_target, target), (loaded_draft, draft)):
        assert loaded.dtype == torch.bfloat16
        for name, tensor in written.state_dict().items():
            assert torch.equal(loaded.state_dict()[name].cpu(), tensor)


def test_weights_are_sharded_and_a_tensor_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_bundle, "SHARD", "100KB")
    models = build_tiny_target(), build_tiny_target()
    gpu_bundle.write_bundle(tmp_path / "bundle", *models, [1], [[2]], SPLITS)
    assert len(list((tmp_path / "bundle" / "target").glob("*.safetensors"))) > 2
    monkeypatch.setattr(gpu_bundle, "LARGEST_FILE", 90_000)
    with pytest.raises(PipelineError, match="smaller target"):
        gpu_bundle.write_bundle(tmp_path / "other", *models, [1], [[2]], SPLITS)
    assert not (tmp_path / "other").exists()


def test_a_missing_draft_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stage, "input_path", lambda relative: tmp_path / relative)
    assert gpu_bundle.main() == 1
    assert "data/draft/draft.json does not exist. Remedy: run the stage" in capsys.readouterr().err
