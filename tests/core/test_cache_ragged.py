"""Rolled-back junk is never seen; sliding windows; packed layers."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import SHAPE, noisy_copy, uncached_greedy
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig, PreTrainedModel, Qwen3Config

from pipeline.core.cache import CachedModel, layer_types
from pipeline.core.decoding import DecodeConfig, decode
from pipeline.core.drafters import ModelDrafter
from pipeline.core.linear import (
    HAS_FBGEMM,
    HalfWeightLinear,
    Int8WeightLinear,
    PackedLinear,
    can_pack,
    pack_linear_layers,
)

WINDOWED = {**SHAPE, "sliding_window": 8}
CONFIGS = {
    "mistral": MistralConfig(num_hidden_layers=2, **WINDOWED),
    "gemma3": Gemma3TextConfig(
        num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"], **WINDOWED
    ),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_sliding_windows_are_right_beyond_the_window(family):
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(CONFIGS[family]).eval()
    prompts = [[1, 2, 3], [index % 100 for index in range(30)]]
    expected = [uncached_greedy(target, prompt, 30) for prompt in prompts]
    for draft in (None, copy.deepcopy(target), noisy_copy(target, 0.02)):
        result = decode(target, draft, prompts, DecodeConfig(draft_length=3, max_new_tokens=30))
        assert [sequence.token_ids for sequence in result.sequences] == expected


LAYERS = {
    "full": ["full_attention", "full_attention"],
    "sliding": ["sliding_attention", "sliding_attention"],
    "mixed": ["sliding_attention", "full_attention"],
}


def layered(kinds: str) -> PreTrainedModel:
    """Qwen3 with the layers that `kinds` names; the weights are the same whatever they are."""
    torch.manual_seed(0)
    config = Qwen3Config(num_hidden_layers=2, layer_types=LAYERS[kinds], use_sliding_window=True, **WINDOWED)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kinds", LAYERS)
def test_windows_on_target_and_draft_need_not_agree(kinds):
    """Full, sliding and mixed layers on either side; prompts shorter and longer than the window, k within and beyond."""
    target = layered(kinds)
    assert set(layer_types(target.config)) == set(LAYERS[kinds])
    prompts = [[1, 2, 3], [index * 7 % 100 for index in range(20)]]
    expected = [uncached_greedy(target, prompt, 16) for prompt in prompts]
    others = [uncached_greedy(layered(other), prompts[1], 16) for other in LAYERS if other != kinds]
    assert expected[1] not in others, "the window must matter"
    kept = []
    for other in LAYERS:
        draft = noisy_copy(layered(other), 0.015)
        for k in (1, 3, 8):
            result = decode(target, draft, prompts, DecodeConfig(draft_length=k, max_new_tokens=16))
            assert [sequence.token_ids for sequence in result.sequences] == expected, (other, k)
            kept.append(result.stats.accepted / result.stats.drafted)
    assert 0 < min(kept) < 1, "the drafts must be kept and refused"


def test_growing_keeps_what_is_stored():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["mistral"]).eval()
    ids = torch.randint(0, 100, (1, 40))
    with torch.inference_mode():
        cached = CachedModel(model, rows=1)
        cached.reserve(20)
        cached.forward(0, ids[:, :20], torch.arange(20)[None], 20)
        cached.reserve(200)
        logits = cached.forward(0, ids[:, 20:], torch.arange(20, 40)[None], 40)
        assert torch.allclose(logits, model(ids, use_cache=False).logits[:, 20:], atol=1e-5)


def test_packed_layers_compute_the_same_and_leave_the_model_alone():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["mistral"]).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    view = pack_linear_layers(model)
    ids = torch.randint(0, 100, (2, 9))
    with torch.inference_mode():
        assert torch.allclose(view(ids).logits, model(ids).logits, atol=1e-5)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    if can_pack(model.lm_head):
        assert isinstance(view.lm_head, PackedLinear) and not isinstance(model.lm_head, PackedLinear)


def test_bfloat16_layers_are_packed_where_the_processor_computes_in_it():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["mistral"]).eval().to(torch.bfloat16)
    view = pack_linear_layers(model)
    assert isinstance(view.lm_head, PackedLinear) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ids = torch.randint(0, 100, (2, 9))
    with torch.inference_mode():
        assert torch.allclose(view(ids).logits, model(ids).logits, atol=0.02 * model(ids).logits.abs().max())


def test_8_bit_weights_move_logits_little_and_mean_the_same_in_every_batch():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["mistral"]).eval().to(torch.bfloat16)
    view = pack_linear_layers(model, half_weights=True)
    if not isinstance(view.lm_head, Int8WeightLinear):
        assert not can_pack(model.lm_head)
        return
    ids = torch.randint(0, 100, (8, 9))
    with torch.inference_mode():
        exact, rounded = model(ids).logits, view(ids).logits
        largest = exact.abs().max()
        assert 0 < (rounded - exact).abs().max() < 0.1 * largest
        states = torch.randn(8, 64, dtype=torch.bfloat16)
        many = view.lm_head(states)
        few = torch.cat([view.lm_head(states[:3]), view.lm_head(states[3:5]), view.lm_head(states[5:])])
        assert torch.allclose(many, few, atol=0.01 * many.abs().max())
        assert (many - model.lm_head(states)).abs().max() > 0


def test_the_8_bit_kernel_gets_no_width_that_it_would_read_beyond():
    layers = {width: nn.Linear(width, 32).to(torch.bfloat16) for width in (16, 40, 48, 100)}
    for width, layer in layers.items():
        packed = pack_linear_layers(layer, half_weights=True)
        assert not isinstance(packed, Int8WeightLinear) or width % 16 == 0
        with torch.inference_mode():
            inputs = torch.randn(2, width, dtype=torch.bfloat16)
            assert torch.allclose(packed(inputs), layer(inputs), atol=0.1)


def test_half_weights_move_logits_little_and_rows_do_not_depend_on_each_other():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["mistral"]).eval()
    view = pack_linear_layers(model, half_weights=True)
    if not isinstance(view.lm_head, HalfWeightLinear):
        assert not HAS_FBGEMM or not can_pack(model.lm_head)
        return
    ids = torch.randint(0, 100, (3, 9))
    with torch.inference_mode():
        exact, half = model(ids).logits, view(ids).logits
        assert 0 < (half - exact).abs().max() < 0.02 * exact.abs().max()
        assert torch.allclose(view(ids[1:2]).logits, half[1:2], atol=1e-6)


def test_half_weight_drafts_stay_lossless():
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(CONFIGS["mistral"]).eval()
    drafter = ModelDrafter(noisy_copy(target, 0.01), half_weights=True)
    result = decode(target, drafter, [[1, 2, 3]], DecodeConfig(draft_length=3, max_new_tokens=30))
    assert result.sequences[0].token_ids == uncached_greedy(target, [1, 2, 3], 30)
    assert 0 < result.stats.accepted < result.stats.drafted
