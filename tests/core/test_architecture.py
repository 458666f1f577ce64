"""A draft from a configuration is random but for the target's embeddings, and speaks the target's token ids."""

from __future__ import annotations

import pytest
import torch
from tiny_models import SHAPE, tiny_llama
from transformers import LlamaConfig, Qwen3Config

from pipeline.core.architecture import copy_embeddings, for_vocabulary, has_width_of, random_draft
from pipeline.core.errors import PipelineError


@pytest.fixture(scope="module")
def target():
    return tiny_llama(vocabulary=112, tie_word_embeddings=False, eos_token_id=3)


def config(**changes) -> Qwen3Config:
    settings = {**SHAPE, "vocab_size": 500, "eos_token_id": 7, "num_hidden_layers": 1, "tie_word_embeddings": True}
    return Qwen3Config(**{**settings, **changes})


def test_rows_and_special_ids_are_the_targets(target):
    given = config(quantization_config={"quant_method": "fp8"})
    found = for_vocabulary(given, target.config)
    assert (found.model_type, found.vocab_size, found.eos_token_id, found.pad_token_id) == ("qwen3", 112, 3, None)
    assert not hasattr(found, "quantization_config"), "the weights that it was about are not used"
    assert given.vocab_size == 500, "the given configuration is left as it is"


def test_weights_come_from_the_seed_alone(target):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    drafts = [random_draft(config(), seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.rand(1), expected), "other random numbers are not disturbed"
    weights = [draft.model.layers[0].mlp.up_proj.weight for draft in drafts]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert drafts[0].dtype == torch.float32 and not drafts[0].training


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_that_fit_are_the_targets(target, tied):
    draft = random_draft(for_vocabulary(config(tie_word_embeddings=tied), target.config), seed=0)
    copy_embeddings(draft, target)
    head, embeddings = draft.get_output_embeddings().weight, draft.get_input_embeddings().weight
    assert torch.equal(embeddings, target.get_input_embeddings().weight)
    assert (head is embeddings) == tied
    assert torch.equal(head, (target.get_input_embeddings() if tied else target.lm_head).weight)
    assert embeddings.data_ptr() != target.get_input_embeddings().weight.data_ptr(), "a copy, not a share"


def test_a_draft_of_another_width_keeps_its_own_embeddings(target):
    narrow = for_vocabulary(config(hidden_size=32), target.config)
    assert not has_width_of(narrow, target.config) and has_width_of(config(), target.config)
    draft = random_draft(narrow, seed=0)
    before = draft.get_input_embeddings().weight.clone()
    copy_embeddings(draft, target)
    assert torch.equal(draft.get_input_embeddings().weight, before)


def test_a_configuration_that_makes_no_model_is_refused():
    with pytest.raises(PipelineError, match="No draft can be built from the configuration llama"):
        random_draft(
            LlamaConfig(**{**SHAPE, "num_key_value_heads": 3, "head_dim": None, "hidden_act": "magic"}), seed=0
        )
