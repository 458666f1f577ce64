"""A grown model computes what the small one computes, and costs what its shape says."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_llama, uncached_greedy
from transformers import GPT2Config, GPT2LMHeadModel

from pipeline.core.cost_twin import TwinShape, grow, grown_config, shape_near, widened_shape
from pipeline.core.errors import PipelineError
from pipeline.core.footprint import active_parameters, meta_model

CPU = torch.device("cpu")
SHAPE = TwinShape(hidden_size=160, intermediate_size=300, num_hidden_layers=5, num_attention_heads=10)
VARIANTS = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "large epsilon": {"rms_norm_eps": 0.5},
    "wide heads": {"head_dim": 24},
}


def small_model(**options):
    """A model whose norms and biases are not what initialisation makes them."""
    model = tiny_llama(**options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_logits_are_preserved(variant):
    model = small_model(**VARIANTS[variant])
    twin = grow(model, SHAPE, torch.float32, CPU)
    ids = torch.randint(0, 100, (3, 40), generator=torch.Generator().manual_seed(1))
    expected, found = model(ids).logits, twin(ids).logits
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert torch.equal(found.argmax(dim=-1), expected.argmax(dim=-1))


@pytest.mark.parametrize("tied", [True, False])
def test_greedy_text_is_preserved_and_the_small_model_untouched(tied):
    model = small_model(tie_word_embeddings=tied)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    twin = grow(model, SHAPE, torch.float32, CPU)
    assert uncached_greedy(twin, [1, 2, 3], 24) == uncached_greedy(model, [1, 2, 3], 24)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("tied", [True, False])
def test_size_is_that_of_the_shape(tied):
    model = small_model(tie_word_embeddings=tied)
    twin = grow(model, SHAPE, torch.bfloat16, CPU)
    attention = 2 * 160 * 16 * 10 + 2 * 160 * 16 * 5
    layer = attention + 3 * 160 * 300 + 2 * 160
    expected = 5 * layer + 160 + 100 * 160 * (1 if tied else 2)
    assert sum(parameter.numel() for parameter in twin.parameters()) == expected
    assert {parameter.dtype for parameter in twin.parameters()} == {torch.bfloat16}
    assert (twin.lm_head.weight is twin.model.embed_tokens.weight) == tied
    assert twin.config.num_key_value_heads == 5 and twin.config.head_dim == 16


def test_only_what_writes_to_the_stream_is_padded_with_zeros():
    twin = grow(small_model(), SHAPE, torch.float32, CPU)
    new = twin.model.layers[-1]
    assert new.self_attn.o_proj.weight.count_nonzero() == 0 and new.mlp.down_proj.weight.count_nonzero() == 0
    for matrix in (new.self_attn.q_proj, new.mlp.gate_proj, twin.lm_head):
        assert 0.3 < matrix.weight.std() < 0.4  # small_model's initializer_range
    assert twin.model.layers[0].self_attn.q_proj.weight.count_nonzero() == 160 * 160


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 32}, "hidden_size >= 64"),
        ({"num_hidden_layers": 1}, "num_hidden_layers >= 2"),
        ({"intermediate_size": 127}, "intermediate_size >= 128"),
        ({"num_attention_heads": 9}, "choose 8 or 10 heads"),
        ({"hidden_size": 165}, "hidden_size=160"),
        ({"num_attention_heads": 8, "hidden_size": 100}, "hidden_size=128"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, words):
    with pytest.raises(PipelineError, match=words):
        grow(tiny_llama(num_hidden_layers=2), TwinShape(**{**vars(SHAPE), **change}), torch.float32, CPU)


def test_other_architectures_are_refused():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=10, n_positions=8))
    with pytest.raises(PipelineError, match="LlamaForCausalLM"):
        grow(model, SHAPE, torch.float32, CPU)


def smollm2_config():
    """Shapes of SmolLM2-135M: three query heads share a key-value head."""
    options = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    heads = {"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}
    config = tiny_llama().config
    for name, value in {**options, **heads, "head_dim": 64}.items():
        setattr(config, name, value)
    return config


def test_the_nearest_shape_to_an_8b_model():
    config = smollm2_config()
    shape = shape_near(config, hidden_size=4096, intermediate_size=14336, parameters=8_030_261_248)
    assert shape == TwinShape(4224, 14336, 34, 66)
    twin = meta_model(grown_config(config, shape, torch.bfloat16))
    assert abs(twin.num_parameters() / 8_030_261_248 - 1) < 0.01


def test_a_draft_is_widened_to_a_number_of_weights():
    config = smollm2_config()
    config.num_hidden_layers = 3
    shape = widened_shape(config, weights=128_000_000, head_tokens=8192)
    shape.check(config)
    assert shape.num_hidden_layers == 3 and shape.intermediate_size * 3 == shape.hidden_size * 8
    weights = active_parameters(meta_model(grown_config(config, shape, torch.bfloat16)), head_tokens=8192)
    assert abs(weights / 128_000_000 - 1) < 0.1
