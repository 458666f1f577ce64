"""The decoding view: the same function in faster parts, and the given model as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import SHAPE, noisy_copy, uncached_greedy
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import repeat_kv

from pipeline.core.attention import FEW_QUERIES, GROUPED, grouped_attention
from pipeline.core.cache import CachedModel
from pipeline.core.decoding import DecodeConfig, decode
from pipeline.core.linear import PackedLinear, ProjectionPart, can_pack, pack_linear_layers
from pipeline.core.packing import PackedNorm, decoding_view, pack_norm

FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen3": {},
    "phi3": {},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
}


def tiny(family: str):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](num_hidden_layers=2, **SHAPE, **FAMILIES[family])
    ).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_view_computes_the_same_and_leaves_the_model_alone(family):
    model = tiny(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules, config = dict(model.named_modules()), copy.deepcopy(model.config)
    view = decoding_view(model)
    ids = torch.randint(0, 100, (2, 9))
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        assert torch.allclose(view(ids, use_cache=False).logits, expected, atol=1e-5 * expected.abs().max())
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.config.to_dict() == config.to_dict() and model.config._attn_implementation == "sdpa"
    assert view.config._attn_implementation == GROUPED and view.config is view.model.config
    assert {type(module) for name, module in view.named_modules() if name.endswith("norm")} == {PackedNorm}


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_decode_to_the_uncached_greedy_tokens(family):
    target = tiny(family)
    prompts = [[1, 2, 3], [index % 100 for index in range(30)], list(range(50, 57))]
    expected = [uncached_greedy(target, prompt, 25) for prompt in prompts]
    for draft in (None, noisy_copy(target, 0.02)):
        result = decode(target, draft, prompts, DecodeConfig(draft_length=4, max_new_tokens=25))
        assert [sequence.token_ids for sequence in result.sequences] == expected


def test_a_row_means_the_same_alone_and_in_a_batch():
    model = tiny("llama")
    ids = torch.randint(0, 100, (8, 12))
    positions = torch.arange(12).expand(8, 12)
    with torch.inference_mode():
        together, alone = CachedModel(model, rows=8), CachedModel(model, rows=1)
        for cached in (together, alone):
            cached.reserve(12)
        many = together.forward(0, ids, positions, 12)
        one = torch.cat([alone.forward(0, ids[5:6, [p]], positions[5:6, [p]], p + 1) for p in range(12)], dim=1)
    assert torch.allclose(many[5:6], one, atol=1e-5 * many.abs().max())


@pytest.mark.parametrize("queries", [1, 5, FEW_QUERIES + 1])
@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize("additive", [False, True])
def test_grouped_attention_is_attention_with_repeated_keys(queries, key_heads, additive):
    torch.manual_seed(0)
    rows, heads, slots = 3, 6, 64
    module = nn.Module()
    module.num_key_value_groups = heads // key_heads
    query = torch.randn(rows, queries, heads, 8).transpose(1, 2)
    key, value = torch.randn(2, rows, key_heads, 128, 8)[..., :slots, :]
    mask = torch.arange(slots) <= torch.randint(0, slots, (rows, 1, queries, 1))
    repeated = [repeat_kv(tensor, heads // key_heads) for tensor in (key, value)]
    expected = scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=0.3).transpose(1, 2)
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    output, _ = grouped_attention(module, query, key, value, mask, scaling=0.3, sliding_window=None)
    assert torch.allclose(output, expected, atol=1e-6)


def test_eager_models_keep_their_own_attention():
    model = tiny("llama")
    model.set_attn_implementation("eager")
    assert decoding_view(model).config is model.config


class OtherRMSNorm(nn.Module):
    """Divides by the mean magnitude: named like the usual norm, and another function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.eps = 1e-6

    def forward(self, inputs):
        return inputs / (inputs.abs().mean(-1, keepdim=True) + self.eps) * self.weight


def test_a_norm_is_exchanged_only_if_it_is_shown_to_be_the_same():
    other = OtherRMSNorm()
    assert pack_norm(other) is other
    norm = tiny("llama").model.norm
    nn.init.normal_(norm.weight)
    assert isinstance(pack_norm(norm), PackedNorm)
    norm.variance_epsilon, right = 1e-2, norm.variance_epsilon
    assert pack_norm(norm).epsilon == 1e-2
    norm.variance_epsilon = right
    norm.register_forward_hook(lambda module, args, output: 2 * output)
    assert pack_norm(norm) is norm


def test_layers_that_do_more_than_their_class_says_are_not_exchanged():
    hooked, patched = nn.Linear(8, 8), nn.Linear(8, 8)
    hooked.register_forward_pre_hook(lambda module, args: None)
    patched.forward = lambda inputs: inputs
    assert not can_pack(hooked) and not can_pack(patched)


@pytest.mark.parametrize("shape", [(64, 300), (1500, 40)])
def test_single_rows_and_many_give_the_same_product(shape):
    layer, inputs = nn.Linear(*shape), torch.randn(5, shape[0])
    packed = pack_linear_layers(layer)
    assert isinstance(packed, PackedLinear) == can_pack(layer), (
        "where layers are not packed, the layer itself is held to it"
    )
    with torch.inference_mode():
        single = torch.cat([packed(row[None]) for row in inputs])
        assert torch.allclose(single, packed(inputs), atol=1e-5)
        assert torch.allclose(single, layer(inputs), atol=1e-5)


def test_layers_of_one_input_are_one_product_whatever_the_order_they_are_asked_in():
    attention = tiny("llama").model.layers[0].self_attn
    packed = pack_linear_layers(attention)
    names = ("q_proj", "k_proj", "v_proj")
    fused = can_pack(attention.q_proj)
    assert all(isinstance(getattr(packed, name), ProjectionPart) == fused for name in names)
    first, second = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    with torch.inference_mode():
        for inputs, order in ((first, names), (second, names[::-1]), (first, names[:2]), (second, names)):
            for name in order:
                expected = getattr(attention, name)(inputs)
                assert torch.allclose(getattr(packed, name)(inputs), expected, atol=1e-5), (name, order)
        for name in names:
            for inputs in (first, second):
                assert torch.allclose(getattr(packed, name)(inputs), getattr(attention, name)(inputs), atol=1e-5)


def test_layers_with_and_without_bias_stay_apart():
    mlp = tiny("llama").model.layers[0].mlp
    mlp.up_proj.bias = nn.Parameter(torch.randn(mlp.up_proj.out_features))
    packed = pack_linear_layers(mlp)
    inputs = torch.randn(2, 64)
    assert not isinstance(packed.up_proj, ProjectionPart)
    with torch.inference_mode():
        assert torch.allclose(packed(inputs), mlp(inputs), atol=1e-5)
