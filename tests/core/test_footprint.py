"""Counts and bytes against real tiny models, caches and optimisers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_settings import distill_config, on_policy_config
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen3MoeConfig,
)

from pipeline.core import footprint
from pipeline.core.cache import CachedModel
from pipeline.core.errors import PipelineError
from pipeline.core.evaluation_settings import EvaluateConfig
from pipeline.core.linear import packs

SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
TIED = LlamaConfig(**SHAPE, tie_word_embeddings=True)
UNTIED = LlamaConfig(**SHAPE, tie_word_embeddings=False)
CPU = torch.device("cpu")


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
def test_a_model_without_weights_counts_like_a_real_one(config):
    real = AutoModelForCausalLM.from_config(config)
    counted = footprint.meta_model(config)
    assert counted.device.type == "meta"
    assert counted.num_parameters() == real.num_parameters()
    stored = {parameter.data_ptr(): parameter.nbytes for parameter in real.parameters()}
    assert footprint.weight_bytes(counted, torch.float32) == sum(stored.values())


def test_an_embedding_that_is_only_looked_up_is_not_active():
    tied, untied = footprint.meta_model(TIED), footprint.meta_model(UNTIED)
    assert footprint.active_parameters(tied) == tied.num_parameters()
    assert footprint.active_parameters(untied) == footprint.active_parameters(tied)
    assert footprint.active_parameters(tied, head_tokens=16) == tied.num_parameters() - 80 * 32
    assert footprint.active_parameters(tied, head_tokens=1000) == tied.num_parameters()


def test_only_the_chosen_experts_are_active():
    options = {"num_experts": 8, "moe_intermediate_size": 16, "tie_word_embeddings": True}
    configs = (Qwen3MoeConfig(**SHAPE, **options, num_experts_per_tok=chosen) for chosen in (2, 3))
    counts = [footprint.active_parameters(footprint.meta_model(config)) for config in configs]
    assert counts[1] - counts[0] == 2 * 3 * 32 * 16  # one more expert in each layer: gate, up and down projection


@pytest.mark.parametrize("name", ["llama", "gemma3", "latent"])
def test_cache_bytes_are_those_of_a_real_cache(name):
    config = {
        "llama": TIED,
        "gemma3": Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=8),
        "latent": DeepseekV3Config(**{**SHAPE, **LATENT}),
    }[name]
    cached = CachedModel(AutoModelForCausalLM.from_config(config).eval(), rows=3)
    cached.reserve(40)
    with torch.inference_mode():
        cached.forward(0, torch.zeros(3, 5, dtype=torch.long), torch.arange(5).expand(3, 5), 5)
    allocated = sum(layer.keys.nbytes + layer.values.nbytes for layer in cached._layers)
    assert footprint.kv_cache_bytes(config, rows=3, positions=40, dtype=torch.float32) == allocated


def test_training_bytes_are_those_of_a_real_step():
    model = AutoModelForCausalLM.from_config(TIED)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 3, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    weights = list(model.parameters())
    tensors = [*weights, *(weight.grad for weight in weights), *moments]
    assert footprint.optimizer_bytes(model.num_parameters()) == sum(tensor.nbytes for tensor in tensors)
    assert footprint.checkpoint_bytes(model.num_parameters()) == sum(tensor.nbytes for tensor in [*weights, *moments])


def test_quantised_weights_leave_embedding_head_and_norms_whole():
    model = footprint.meta_model(UNTIED)
    linear = footprint.linear_parameters(model)
    rest = model.num_parameters() - linear
    assert rest == 2 * 96 * 32 + 5 * 32  # embedding, head, five norms
    assert footprint.weight_bytes(model, torch.bfloat16, "8bit") == 2 * rest + linear
    assert footprint.weight_bytes(model, torch.bfloat16, "4bit") == 2 * rest + linear * 9 // 16


def test_float32_copies_are_counted_in_half_precision_only(monkeypatch):
    monkeypatch.setattr(footprint, "matmul_speed", lambda *_: 1e9)
    target, draft = footprint.meta_model(UNTIED), footprint.meta_model(TIED)
    half = footprint.Pair(target, draft, CPU, torch.bfloat16, torch.bfloat16, "none")
    full = footprint.Pair(target, draft, CPU, torch.float32, torch.float32, "none")
    assert half.evaluate_memory(64, 40)["float32 copies"] > 4 * target.num_parameters()
    assert full.evaluate_memory(64, 40)["float32 copies"] == 0
    alone, everywhere = (full.evaluate_memory(64, 40, 8, everywhere=flag) for flag in (False, True))
    both = full.serving_memory(8, 40)
    assert alone["caches at the largest batch"] == 2 * both["target cache"] + both["draft cache"]
    assert everywhere["caches at the largest batch"] == 4 * both["target cache"] + 2 * both["draft cache"]
    for pair in (half, full):
        weights = pair.target_dtype.itemsize * target.num_parameters()
        packed = footprint.packed_bytes(target, pair.target_dtype, CPU)
        assert (packed > 0) == packs(pair.target_dtype, CPU) and packed < weights
        assert pair.generate_memory(8, 40)["target"] == weights + packed
    distill = distill_config(epochs=2, head_tokens=96)
    work = footprint.Workload(10, 4, prompt_tokens=20, answer_tokens=30, rows=8, decoded_tokens=1000)
    seconds = full.seconds(work, distill)
    active = footprint.active_parameters(target)
    assert seconds["generate"] == pytest.approx(2 * active * 10 * 50 / 1e9)
    assert seconds["distill"] == pytest.approx(6 * footprint.active_parameters(draft) * 2 * 4 * 50 / 1e9)
    assert seconds["evaluate"] == pytest.approx(2 * active * 1000 / 1e9)


def test_a_pass_over_more_tokens_touches_more_experts():
    options = {"num_experts": 8, "moe_intermediate_size": 16, "tie_word_embeddings": True}
    model = footprint.meta_model(Qwen3MoeConfig(**SHAPE, **options, num_experts_per_tok=2))
    one, three, many = (footprint.active_parameters(model, tokens=tokens) for tokens in (1, 3, 1000))
    expert = 2 * 3 * 32 * 16  # in each of two layers: gate, up and down projection
    assert three - one == pytest.approx((8 * (1 - 0.75**3) - 2) * expert, abs=4)
    assert many == model.num_parameters()


def test_what_the_draft_costs_where_it_is_served():
    """Weights and caches by hand, and the requests that fit around them."""
    target, draft = footprint.meta_model(UNTIED), footprint.meta_model(TIED)
    pair = footprint.Pair(target, draft, CPU, torch.bfloat16, torch.float32, "8bit")
    cache = 2 * 64 * 2 * (2 * 8)  # layers, positions, keys and values of two heads of 8
    assert pair.serving_memory(3, 40) == {
        "target weights": footprint.weight_bytes(target, torch.bfloat16, "8bit"),
        "target cache": 3 * cache * 2,
        "draft weights": 4 * draft.num_parameters(),
        "draft cache": 3 * cache * 4,
    }
    needs = pair.serving_memory(1, 40)
    memory = needs["target weights"] + 10 * needs["target cache"] + 5
    assert pair.requests_that_fit(memory, 40) == (10, 0)
    room = needs["draft weights"] // (needs["target cache"] + needs["draft cache"]) + 1
    alone, both = pair.requests_that_fit(memory + 100 * room * needs["target cache"], 40)
    left = memory + 100 * room * needs["target cache"] - needs["target weights"] - needs["draft weights"]
    assert alone == 10 + 100 * room
    assert both == left // (3 * needs["target cache"]), "a cache in float32 takes twice that of bfloat16"
    assert pair.requests_that_fit(100, 40) == (0, 0)


SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
WINDOWED = {  # and the positions that an engine holds of 100, over both layers
    "gemma3": (Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=64, **SLIDING_AND_FULL), 64 + 128),
    "mistral": (MistralConfig(**SHAPE, head_dim=8, sliding_window=64), 64 + 64),
    "mistral without a window": (MistralConfig(**SHAPE, head_dim=8, sliding_window=None), 128 + 128),
    "llama4": (
        Llama4TextConfig(
            **SHAPE, head_dim=8, attention_chunk_size=32, layer_types=["chunked_attention", "full_attention"]
        ),
        32 + 128,
    ),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_an_engine_holds_a_window_of_layers_that_have_one(name):
    """By hand: a position takes keys and values of two heads of 8 in 2 bytes; our own cache holds all positions."""
    config, positions = WINDOWED[name]
    assert footprint.served_cache_bytes(config, rows=3, positions=100, dtype=torch.bfloat16) == 3 * positions * 32 * 2
    assert footprint.kv_cache_bytes(config, rows=3, positions=100, dtype=torch.bfloat16) == 3 * 256 * 32 * 2
    short = footprint.served_cache_bytes(config, rows=3, positions=20, dtype=torch.bfloat16)
    assert short == footprint.kv_cache_bytes(config, rows=3, positions=20, dtype=torch.bfloat16)


def test_windows_count_where_a_pair_is_served():
    target, draft = (footprint.meta_model(config) for config in (WINDOWED["gemma3"][0], TIED))
    pair = footprint.Pair(target, draft, CPU, torch.bfloat16, torch.bfloat16, "none")
    needs = pair.serving_memory(3, 100)
    assert needs["target cache"] == 3 * (64 + 128) * 32 * 2 and needs["draft cache"] == 3 * 256 * 32 * 2
    memory = needs["target weights"] + needs["draft weights"] + 5 * (192 + 256) * 32 * 2
    assert pair.requests_that_fit(memory, 100)[1] == 5
    costs = pair.costs_by_bytes(3, 100, [1], head_tokens=16, half_weights=False)
    weights = footprint.read_bytes(target, torch.bfloat16)
    assert costs.target_pass_seconds[0] == weights + needs["target cache"]
    assert pair.generate_memory(3, 100)["cache"] == 3 * 256 * 32 * 2, "our own decoder's"


def test_costs_by_bytes_count_the_trimmed_head_and_the_caches():
    target, draft = footprint.meta_model(UNTIED), footprint.meta_model(TIED)
    pair = footprint.Pair(target, draft, CPU, torch.float32, torch.bfloat16, "none")
    costs = pair.costs_by_bytes(4, 32, [1, 3], head_tokens=16, half_weights=False)
    cache = 4 * 2 * 32 * 2 * (2 * 8)
    embedding = 96 * 32
    assert costs.target_pass_seconds == dict.fromkeys((0, 1, 3), 4 * (target.num_parameters() - embedding) + 4 * cache)
    assert costs.draft_step_seconds == 2 * (draft.num_parameters() - 80 * 32) + 2 * cache
    assert costs.verify_cost(3) == 1
    halved = pair.costs_by_bytes(4, 32, [1], head_tokens=16, half_weights=True)
    share = 0.5 if packs(torch.bfloat16, CPU) else 1.0
    assert halved.draft_step_seconds == share * (costs.draft_step_seconds - 2 * cache) + 2 * cache
    quantized = footprint.Pair(target, draft, CPU, torch.float32, torch.bfloat16, "8bit")
    linear = footprint.linear_parameters(target)
    reads = quantized.costs_by_bytes(4, 32, [1], 16, False).target_pass_seconds[0]
    assert costs.target_pass_seconds[0] - reads == 3 * linear


def test_checking_costs_a_mixture_of_experts_more_than_a_step():
    options = {"num_experts": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    target = footprint.meta_model(Qwen3MoeConfig(**SHAPE, **options))
    pair = footprint.Pair(target, footprint.meta_model(TIED), CPU, torch.float32, torch.float32, "none")
    costs = pair.costs_by_bytes(1, 32, [1, 4], 16, False)
    assert 1 < costs.verify_cost(1) < costs.verify_cost(4)


def test_memory_of_training_counts_every_model_and_the_head_that_the_loss_sees():
    target, draft = footprint.meta_model(UNTIED), footprint.meta_model(TIED)
    pair = footprint.Pair(target, draft, CPU, torch.float32, torch.float32, "none")
    rows = draft.get_output_embeddings().weight.shape[0]

    def needs(**changes) -> dict[str, int]:
        return pair.distill_memory(distill_config(**{"head_tokens": 8, "sampled_rows": 4, **changes}), positions=10)

    stored = needs()
    assert stored["target"] == stored["reference draft"] == 0
    assert stored["loss"] == footprint.loss_bytes(64, 12)
    assert needs(sampled_rows=None)["loss"] == footprint.loss_bytes(64, rows)
    assert needs(chunk_tokens=16)["loss"] == footprint.loss_bytes(16, 12)
    assert needs(target="online")["target"] == footprint.weight_bytes(target, torch.float32)
    assert needs(target="online")["loss"] == footprint.loss_bytes(64, rows)
    selecting = needs(selected_share=0.5, reference_draft="data/draft")
    assert selecting["reference draft"] == footprint.weight_bytes(draft, torch.float32)
    eighth = needs(optimizer="adamw_8bit")["weights, gradients and optimizer"]
    assert (
        eighth == 10 * draft.num_parameters()
        and stored["weights, gradients and optimizer"] == 16 * draft.num_parameters()
    )
    phase = needs(on_policy=on_policy_config(steps=1, prompts_per_step=50))
    assert phase["target"] > 0 and phase["activations"] > stored["activations"]
    assert phase["loss"] == footprint.loss_bytes(50 * 6, rows), "of all answer tokens at once"


def test_decoded_tokens_are_bounded_by_the_golden_prompts():
    config = EvaluateConfig(
        siblings=[],
    repeats=1, sweep_prompts=1, batch_sizes=[2, 4], batch_prompts=8, temperatures=[0.7], baselines_everywhere=False, temperature_prompts=3, condition_prompts_other=0,
        max_new_tokens=10, timed_prompts=24, timed_prompts_other=6, baseline_prompts=12, reference_prompts=3,
        dev_prompts=2, draft_lengths=[1], lookup_ngram=3, lossless_prompts=4, lossless_new_tokens=5, near_tie_gap=0.5,
        bootstrap_samples=100, tokens_per_forward=64,
    )  # fmt: skip
    own, others, baselines, once = 2 * 5, 2 * 6, 2 * 5, 3 + 2
    expected = (own + others + baselines + once + 2 * (1 * 1 + 3 * 1 + 5 * 2)) * 10 + 2 * 4 * 5
    assert footprint.decoded_tokens(config, {"legal": 5, "code": 9}, "legal") == expected
    elsewhere = dataclasses.replace(config, condition_prompts_other=6)
    more = 2 * 6 * (1 + 1 + 2) * 10
    assert footprint.decoded_tokens(elsewhere, {"legal": 5, "code": 9}, "legal") == expected + more
    nothing = dataclasses.replace(elsewhere, sweep_prompts=0)
    assert footprint.decoded_tokens(nothing, {"legal": 5, "code": 9}, "legal") == expected + (2 * 6 * 3 - 2) * 10
    again = dataclasses.replace(config, repeats=3)
    once_only = (3 + 2) * 10 + 2 * 4 * 5
    assert footprint.decoded_tokens(again, {"legal": 5, "code": 9}, "legal") == 3 * (expected - once_only) + once_only
    everyone = dataclasses.replace(config, baselines_everywhere=True)
    more = 2 * 6 + (4 - 2) * (1 * 1 + 3 * 1 + 5 * 2)
    assert footprint.decoded_tokens(everyone, {"legal": 5, "code": 9}, "legal") == expected + more * 10


@pytest.mark.parametrize("config", [BloomConfig(hidden_size=32, n_layer=1, n_head=2), MambaConfig(num_hidden_layers=1)])
def test_a_forward_pass_without_positions_is_refused(config):
    with pytest.raises(PipelineError, match=f"{config.model_type}: its forward pass takes no position_ids"):
        footprint.meta_model(config)


def test_a_model_that_is_no_causal_language_model_is_refused():
    from transformers import ViTConfig

    with pytest.raises(PipelineError, match="vit: no model can be built"):
        footprint.meta_model(ViTConfig())


def test_the_machine_is_measured(monkeypatch):
    monkeypatch.setattr(footprint, "SPEED_SECONDS", 0.01)
    monkeypatch.setattr(footprint, "SPEED_MATRICES", 1)
    assert footprint.matmul_speed(1, torch.float32, CPU) > 1e6
    free = footprint.free_memory_bytes(CPU)
    assert free is None or free > 1 << 20
