"""Settings of a distillation of tiny models on a few answers, in one place."""

from __future__ import annotations

from pipeline.core.training import DistillConfig, OnPolicyConfig


def on_policy_config(**changes) -> OnPolicyConfig:
    values = {
        "steps": 0, "learning_rate": 1e-3, "beta": 0.5, "sampling_temperature": 0.8, "kl_temperature": 1.0,
        "prompts_per_step": 4, "max_new_tokens": 6,
    }  # fmt: skip
    return OnPolicyConfig(**{**values, **changes})


def distill_config(**changes) -> DistillConfig:
    values = {
        "epochs": 8, "learning_rate": 3e-3, "warmup_share": 0.1, "weight_decay": 0.0, "adam_beta2": 0.98,
        "max_grad_norm": 1.0, "tokens_per_step": 64, "tokens_per_forward": 64, "evaluations": 2, "head_tokens": 52,
        "train_on_prompts": False, "freeze_embeddings": False, "loss": "forward_kl", "jensen_shannon_beta": 0.5,
        "kl_temperature": 1.0, "target": "stored", "sampled_rows": None, "selected_share": 1.0,
        "reference_draft": None, "optimizer": "adamw", "chunk_tokens": 2048, "patience": None,
        "on_policy": on_policy_config(),
    }  # fmt: skip
    return DistillConfig(**{**values, **changes})
