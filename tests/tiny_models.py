"""Tiny models, built in code, that make the decoder's tests bite."""

from __future__ import annotations

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 100
SHAPE = {  # of configs of any family; the number of layers and their kinds are the test's
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.25,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def tiny_llama(seed: int = 0, std: float = 0.35, vocabulary: int = VOCABULARY, **options) -> LlamaForCausalLM:
    """Two layers, float32, random weights. std 0.35 gives varied text, 0.02 gives loops with small logit gaps."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": std,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **options})).eval()


def noisy_copy(model: LlamaForCausalLM, scale: float, seed: int = 1) -> LlamaForCausalLM:
    """A deep copy with Gaussian noise of `scale` times each matrix's own standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    noisy = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in noisy.parameters():
            if parameter.dim() > 1:
                parameter += torch.randn(parameter.shape, generator=generator) * parameter.std() * scale
    return noisy


@torch.inference_mode()
def uncached_greedy(model, prompt: list[int], tokens: int, allowed: int | None = None) -> list[int]:
    """The oracle: the whole sequence again for every token, no cache, argmax over the first `allowed` ids."""
    ids = list(prompt)
    for _ in range(tokens):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(logits[:allowed].argmax().item())
    return ids[len(prompt) :]


@torch.inference_mode()
def next_logits(model, ids: list[int]) -> torch.Tensor:
    """Logits after `ids`, without a cache, [vocab]."""
    return model(torch.tensor([ids]), use_cache=False).logits[0, -1]


def chain(following: dict[int, int], vocabulary: int = 16) -> LlamaForCausalLM:
    """A target whose greedy token depends on the last one alone: `following` says how."""
    model = tiny_llama(vocabulary=vocabulary, tie_word_embeddings=False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocabulary, model.config.hidden_size))
        model.lm_head.weight.zero_()
        for token, successor in following.items():
            model.lm_head.weight[successor, token] = 1.0
    return model
