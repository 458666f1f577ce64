"""A pruned draft computes with the layers it kept, whatever their config says of them by place or by number."""

from __future__ import annotations

import pytest
import torch
from test_families import CONFIGS, LLAMA4, SHAPE, build
from transformers import Llama4TextConfig, Qwen3MoeConfig, SmolLM3Config

from pipeline.core.errors import PipelineError
from pipeline.core.pruning import check_layer_counts, keep_layers, outer_layers

CASES = {
    "every fourth layer without rotary embeddings": (SmolLM3Config(num_hidden_layers=4, **SHAPE), [1, 3]),
    "rotary and other layers": (SmolLM3Config(num_hidden_layers=4, **SHAPE), [0, 3]),
    "experts and dense, listed as experts": (Llama4TextConfig(**SHAPE, **LLAMA4), [0, 2]),
    "experts and dense, listed as dense": (CONFIGS["qwen3_moe"], [1, 2]),
    "windows": (CONFIGS["mixtral with a window"], [1]),
}


@pytest.mark.parametrize("case", CASES)
def test_kept_layers_compute_what_they_did(case):
    """The pruned model equals the whole one with its other layers taken out."""
    config, keep = CASES[case]
    model = build(config)
    pruned = keep_layers(model, keep)
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            if index not in keep:
                layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
        ids = torch.tensor([[index * 7 % 100 for index in range(20)]])
        assert torch.allclose(pruned(ids).logits, model(ids, use_cache=False).logits, atol=1e-4)


def test_layers_that_do_not_make_a_model_are_refused():
    """Every second layer has experts, by its number: moved to another place it would be a dense one."""
    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 2}
    model = build(Qwen3MoeConfig(num_hidden_layers=4, **options, **SHAPE))
    with pytest.raises(PipelineError, match="cannot be taken out"):
        keep_layers(model, [1, 2])


@pytest.mark.parametrize(
    ("count", "layers"), [(1, [0]), (2, [0, 29]), (3, [0, 1, 29]), (4, [0, 1, 28, 29]), (5, [0, 1, 2, 28, 29])]
)
def test_the_first_and_the_last_layers_are_kept(count, layers):
    assert outer_layers(count, 30) == layers


@pytest.mark.parametrize("counts", [[], [0, 2], [2, 4]])
def test_numbers_of_layers_that_do_not_fit_are_refused(counts):
    with pytest.raises(PipelineError, match="between 1 and 3"):
        check_layer_counts(counts, 4)
    check_layer_counts([3, 1], 4)
