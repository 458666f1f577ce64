"""Answers are the target's own, recorded with their settings, and a killed run loses no finished shard."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from tiny_models import chain, next_logits
from tqdm import tqdm

from pipeline import generate, prepare, stage
from pipeline.adapters.answer_files import read_answers, read_facts, shards, write_answers
from pipeline.core.decoding import DecodeConfig
from pipeline.core.errors import PipelineError
from pipeline.core.generation import EncodedPrompt, generate_answers
from pipeline.core.sampling import Sampling, probabilities


def config(module, *overrides: str):
    with initialize_config_dir(stage.CONF_DIR, version_base="1.3"):
        cfg = compose("config", overrides=["experiment=smoke", "generate.max_new_tokens=10", *overrides])
    return stage.typed_config(cfg, module.Config)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project folder with the tiny domain's prompts."""
    folder = tmp_path_factory.mktemp("project")
    patch = pytest.MonkeyPatch()
    patch.setattr(stage, "PROJECT_ROOT", folder)
    prepare.run(config(prepare))
    yield folder
    patch.undo()


def test_answers_and_probabilities_are_the_targets(project):
    generate.run(config(generate))
    train, golden = (read_answers(project / "data/answers" / split) for split in ("train", "golden"))
    assert {answer.sampling.temperature for answer in golden} == {0.0}
    sampled = [answer for answer in train if answer.sampling.temperature > 0]
    assert 0.2 < len(sampled) / len(train) < 0.8
    target = generate.Target(config(generate).target, project)
    for answer in [golden[0], train[0], sampled[0]]:
        ids = answer.prompt_ids.tolist()
        for index, token in enumerate(answer.answer_ids.tolist()):
            logprobs = next_logits(target.model, ids)[:259].log_softmax(-1)
            assert answer.logprobs[index] == pytest.approx(logprobs[token].item(), abs=1e-4)
            assert np.allclose(answer.top_logprobs[index], logprobs.topk(8).values.numpy(), atol=2e-3)
            if answer.sampling.temperature == 0:
                assert token == logprobs.argmax().item() == answer.top_ids[index][0]
            ids.append(token)
        assert len(answer.answer_ids) <= 10
    assert read_facts(project / "data/answers/train") == read_facts(project / "data/answers/dev")


def test_a_killed_run_continues_and_ends_the_same(project, monkeypatch):
    settings = config(generate, "generate.shard_rows=8", "seed=3")
    original = generate.generate_answers

    def killed(*arguments):
        for number, answer in enumerate(original(*arguments)):
            if number == 20:
                raise KeyboardInterrupt
            yield answer

    before = [path.read_bytes() for path in shards(project / "data/answers/train")]
    monkeypatch.setattr(generate, "generate_answers", killed)
    with pytest.raises(KeyboardInterrupt):
        generate.run(settings)
    assert [path.read_bytes() for path in shards(project / "data/answers/train")] == before, "outs stay whole"
    asked = []

    def counted(target, prompts, *rest):
        asked.extend(prompts)
        return original(target, prompts, *rest)

    monkeypatch.setattr(generate, "generate_answers", counted)
    generate.run(settings)
    resumed = read_answers(project / "data/answers/train")
    total = sum(len(read_answers(project / "data/answers" / split)) for split in generate.SPLITS)
    assert len(asked) == total - 16, "two shards of eight had been kept"
    shutil.rmtree(project / ".cache/generate")
    monkeypatch.setattr(generate, "generate_answers", original)
    generate.run(settings)
    straight = read_answers(project / "data/answers/train")
    assert [a.answer_ids.tolist() for a in resumed] == [a.answer_ids.tolist() for a in straight]


def contents(project) -> list[bytes]:
    return [path.read_bytes() for split in generate.SPLITS for path in shards(project / "data/answers" / split)]


def test_what_was_answered_is_kept_until_other_settings_have_been_answered(project, monkeypatch, capsys):
    """A kill before DVC has recorded the answers costs nothing; neither does another size of shards."""
    settings = config(generate, "generate.shard_rows=7", "seed=4")
    generate.run(settings)
    written = contents(project)
    shutil.rmtree(project / "data/answers")
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(generate, "generate_answers", lambda *_: pytest.fail("answered again"))
        generate.run(settings)
        assert contents(project) == written
        assert capsys.readouterr().out.startswith("generate: every prompt is answered already")
        generate.run(config(generate, "generate.shard_rows=9", "seed=4"))
        assert "shard_rows: 9" in (project / "data/answers/config.yaml").read_text()
    unfinished = project / ".cache/generate/unfinished"
    unfinished.mkdir()
    generate.run(config(generate, "seed=5"))
    assert len(list((project / ".cache/generate").iterdir())) == 2 and unfinished.is_dir()
    unfinished.rmdir()


def test_a_second_process_does_not_answer_the_same_prompts(project):
    settings = config(generate, "seed=7")
    generate.run(settings)
    (kept,) = (project / ".cache/generate").iterdir()
    with stage.alone("generate", kept.name):
        with pytest.raises(PipelineError, match="Another process runs generate here already"):
            generate.run(settings)
        generate.run(config(generate, "seed=8"))
        assert kept.is_dir(), "what another process works with stays"


def test_other_code_answers_anew(project, monkeypatch):
    generate.run(config(generate, "seed=6"))
    monkeypatch.setattr(generate, "code_fingerprint", lambda _: "changed")
    monkeypatch.setattr(generate, "generate_answers", lambda model, chosen, *_: pytest.exit(str(len(chosen))))
    with pytest.raises(pytest.exit.Exception):
        generate.run(config(generate, "seed=6"))
    assert not list((project / ".cache/generate").iterdir())


def test_sampled_answers_follow_the_sampling(project):
    """Every sampled token lies in the support of its filtered distribution."""
    generate.run(config(generate, "generate.sampling.top_k=2", "generate.sampled_share=1.0"))
    target = generate.Target(config(generate).target, project)
    answers = read_answers(project / "data/answers/train")
    assert all(answer.sampling.temperature > 0 for answer in answers)
    for answer in answers[:5]:
        ids = answer.prompt_ids.tolist()
        for token in answer.answer_ids.tolist():
            kept = probabilities(next_logits(target.model, ids)[:259], Sampling(0.7, top_k=2))
            assert kept[token] > 0 and int((kept > 0).sum()) == 2
            ids.append(token)


def test_prompts_that_do_not_fit_are_named_before_weights_load(project, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "__call__", lambda *_: pytest.fail("a model ran"))
    with pytest.raises(PipelineError, match="at most"):
        generate.run(config(generate, "generate.max_new_tokens=1010"))


def test_sampled_answers_need_a_temperature():
    with pytest.raises(PipelineError, match="temperature"):
        config(generate, "generate.sampling.temperature=0")


def test_ids_that_are_no_canonical_split_are_kept_with_their_probabilities(tmp_path):
    """T05: a target that answers he + llo + eos gives three ids and three rows, though a tokenizer would merge two."""
    prompt, he, llo, eos = 1, 4, 6, 2
    target = chain({prompt: he, he: llo, llo: eos})
    settings = DecodeConfig(1, 8, eos_token_ids=(eos,), return_logprobs=3, prompt_logprobs=3)
    prompts = [EncodedPrompt("p", "legal", "continuation", "c", [prompt])]
    answers = list(generate_answers(target, prompts, settings, 1, 0, tqdm(disable=True)))
    write_answers(tmp_path / "0.parquet", answers, {"vocabulary_size": 16})
    (back,) = read_answers(tmp_path)
    assert (back.answer_ids.tolist(), back.finish_reason) == ([he, llo, eos], "eos")
    assert back.top_ids[:, 0].tolist() == [he, llo, eos] and back.top_logprobs.shape == (3, 3)
    assert np.allclose(back.logprobs, back.top_logprobs[:, 0], atol=1e-3)
