"""P08: answers are used only with the target and the settings that they were generated with."""

from __future__ import annotations

import pytest
import torch
from hydra import compose, initialize_config_dir
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline import distill, generate, prepare, stage
from pipeline.core.errors import PipelineError
from pipeline.core.tiny import save_tiny_target


class Reached(Exception):
    """Training would begin."""


def config(module, *overrides: str):
    common = ["experiment=smoke", "target.id=models/tiny", "generate.max_new_tokens=4"]
    with initialize_config_dir(stage.CONF_DIR, version_base="1.3"):
        return stage.typed_config(compose("config", overrides=[*common, *overrides]), module.Config)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project folder with a target of its own and that target's answers; nothing is trained in it."""

    def training(*_, **__):
        raise Reached

    folder = tmp_path_factory.mktemp("project")
    patch = pytest.MonkeyPatch()
    patch.setattr(stage, "PROJECT_ROOT", folder)
    patch.setattr(distill, "distill", training)
    save_tiny_target(folder / "models/tiny")
    prepare.run(config(prepare))
    generate.run(config(generate))
    yield folder
    patch.undo()


def test_the_answers_of_the_same_target_and_settings_are_used(project):
    with pytest.raises(Reached):
        distill.run(config(distill, "generate.batch_size=3", "seed=5"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("generate.top_logprobs=16", "generate.top_logprobs was 8, is 16"),
        ("generate.max_new_tokens=5", "generate.max_new_tokens was 4, is 5"),
        ("generate.sampling.temperature=0.9", "generate.sampling was"),
        ("generate.sampled_share=0.5", "generate.sampled_share was"),
        ("target.dtype=float16", "differs in dtype"),
    ],
)
def test_other_settings_stop_training(project, override, words):
    with pytest.raises(PipelineError, match=words):
        distill.run(config(distill, override))


def test_another_template_stops_training(project):
    folder = project / "models/tiny"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    original = tokenizer.chat_template
    try:
        tokenizer.chat_template = original.replace("assistant", "model")
        tokenizer.save_pretrained(folder)
        with pytest.raises(PipelineError, match="differs in template"):
            distill.run(config(distill))
    finally:
        tokenizer.chat_template = original
        tokenizer.save_pretrained(folder)


def test_weights_overwritten_in_place_stop_training_until_the_answers_are_theirs(project):
    folder = project / "models/tiny"
    other = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in other.model.layers[1].parameters():
            parameter.mul_(1.1)
    other.save_pretrained(folder)
    with pytest.raises(PipelineError, match="differs in target_fingerprint"):
        distill.run(config(distill))
    generate.run(config(generate))
    with pytest.raises(Reached):
        distill.run(config(distill))
