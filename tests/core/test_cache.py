"""Which families the ragged cache serves: refused by name, or computing exactly what they compute without a cache."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Llama4TextConfig

from pipeline.core.cache import CachedModel, layer_types, visibility_masks
from pipeline.core.errors import PipelineError

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
BOTH = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
ATTENTION_ONLY = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "mixtral": EXPERTS,
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "gemma2": {**BOTH, "query_pre_attn_scalar": 8},
    "gemma3_text": {**BOTH, "query_pre_attn_scalar": 8},
    "phi3": {},
    "smollm3": {},
    "gpt_oss": {**BOTH, **EXPERTS},
    "cohere2": BOTH,
    "granitemoehybrid": {
        "layer_types": ["attention", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2,
        "shared_intermediate_size": 48, "num_local_experts": 0, "num_experts_per_tok": 0,
    },
}  # fmt: skip
RECURRENT = {
    "mamba": "no attention layers",
    "mamba2": "no attention layers",
    "falcon_mamba": "no attention layers",
    "rwkv": "no attention layers",
    "xlstm": "no attention layers",
    "jamba": "linear_attention",
    "zamba": "hybrid",
    "zamba2": "hybrid",
    "bamba": "linear_attention",
    "falcon_h1": "hybrid",
    "qwen3_next": "linear_attention",
    "recurrent_gemma": "linear_attention|recurrent",
    "lfm2_moe": "conv_L_cache",
    "nemotron_h": "mamba|linear_attention",
    "kimi_linear": "linear_attention|kda",
    "olmo_hybrid": "linear_attention",
    "qwen3_5_text": "linear_attention",
    "bailing_hybrid": "linear_attention",
    "minimax": "linear_attention",
    "granitemoehybrid": "linear_attention|mamba",
    "gpt_neo": "attention_types",
}


@pytest.mark.parametrize("family", RECURRENT)
def test_a_family_that_cannot_be_rolled_back_is_refused_by_name(family):
    config = CONFIG_MAPPING[family]()
    config.name_or_path = "models/mine"
    with pytest.raises(PipelineError, match=f"models/mine: .* rolled back .*{family}: .*({RECURRENT[family]})"):
        layer_types(config)


def test_one_convolution_among_attention_layers_is_enough():
    with pytest.raises(PipelineError, match="conv"):
        layer_types(CONFIG_MAPPING["lfm2"](num_hidden_layers=3, full_attn_idxs=[0, 2]))


def test_llama_4_mixes_chunked_and_full_attention():
    config = Llama4TextConfig(num_hidden_layers=4)
    assert layer_types(config) == ["chunked_attention"] * 3 + ["full_attention"]
    config.attention_chunk_size, config._attn_implementation = 3, "sdpa"
    masks = visibility_masks(config, torch.tensor([[4, 5], [1, 2]]), 8, torch.float32)
    seen = [[row.nonzero().flatten().tolist() for row in rows[0]] for rows in masks["chunked_attention"]]
    assert seen == [[[3, 4], [3, 4, 5]], [[0, 1], [0, 1, 2]]]
    assert masks["full_attention"].sum(dim=-1).flatten().tolist() == [5, 6, 2, 3]


EAGER = ("gemma2", "gpt_oss")  # what transformers runs without fused attention, by default in some of its versions


@pytest.mark.parametrize("family", ATTENTION_ONLY)
def test_rolled_back_junk_leaves_no_trace(family):
    """Ragged rows, junk written ahead and written over: the logits are those of a pass without a cache."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**SHAPE, **ATTENTION_ONLY[family]})
    attention = "eager" if family in EAGER else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    assert set(layer_types(model.config)) <= {"full_attention", "sliding_attention"}
    ids = torch.randint(1, 64, (2, 14))
    starts = torch.tensor([8, 5])
    cached = CachedModel(model, rows=2)
    cached.reserve(20)
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        for row, start in enumerate(starts.tolist()):
            cached.forward(row, ids[row : row + 1, :start], torch.arange(start)[None], start)
        positions = starts[:, None] + torch.arange(3)
        cached.forward(0, torch.randint(1, 64, (2, 3)), positions, 11)
        logits = cached.forward(0, ids.gather(1, positions), positions, 11)
    expected = expected[torch.arange(2)[:, None], positions]
    assert torch.allclose(logits, expected, atol=1e-3 * expected.abs().max().item())
