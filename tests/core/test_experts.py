"""A pass over more tokens touches more experts, and the count says how many."""

from __future__ import annotations

import pytest
import torch
from test_families import CONFIGS, build
from tiny_models import tiny_llama

from pipeline.core.cost_model import Costs
from pipeline.core.experts import experts_touched, routers

TEXTS = [[index * 7 % 100 for index in range(40)], [index * 11 % 100 for index in range(25)]]
MIXTURES = {name: config for name, config in CONFIGS.items() if "window" not in name}


@pytest.mark.parametrize("family", MIXTURES)
def test_more_tokens_touch_more_experts(family):
    config = MIXTURES[family]
    model = build(config)
    touched = experts_touched(model, TEXTS, [1, 2, 4, 9, 26, 41])
    assert list(touched) == [1, 2, 4, 9, 26], "no text has 41 tokens"
    assert touched[1] == config.num_experts_per_tok
    counts = list(touched.values())
    assert all(fewer < more for fewer, more in zip(counts[:4], counts[1:4], strict=False))
    available = getattr(config, "num_local_experts", None) or config.num_experts
    assert counts[-2] <= counts[-1] <= available
    assert not any(module._forward_hooks for module in model.modules())


def test_only_layers_with_experts_count():
    """Qwen3-MoE with a dense layer between, Llama 4 with a dense layer last."""
    assert len(routers(build(CONFIGS["qwen3_moe"]))) == len(routers(build(CONFIGS["llama4"]))) == 2


@pytest.mark.parametrize("family", ["mixtral", "llama4"])
def test_the_count_is_that_of_the_routers_own_logits(family):
    """Against the layer inputs and router weights: the top logits of three tokens in a row, first layer."""
    model = build(CONFIGS[family])
    (router, *_) = routers(model)
    seen = []
    handle = router.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].reshape(-1, 64)))
    with torch.no_grad():
        model(torch.tensor([TEXTS[0]]), use_cache=False)
    handle.remove()
    best = (seen[0] @ router.weight.detach().T).topk(router.top_k).indices
    expected = [len(set(best[start : start + 3].flatten().tolist())) for start in range(38)]
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    assert experts_touched(model, TEXTS[:1], [3])[3] == pytest.approx(sum(expected) / 38)


def test_a_dense_model_touches_none():
    assert experts_touched(tiny_llama(), TEXTS, [1, 2]) is None


def test_the_counts_stand_beside_the_times_of_the_same_passes():
    costs = Costs(1.0, {0: 2.0, 3: 3.0})
    assert costs.document()["experts_touched"] is None
    costs.experts_touched = experts_touched(build(CONFIGS["mixtral"]), TEXTS, [1, 4])
    document = costs.document()
    assert document["experts_touched"].keys() == document["target_pass_seconds"].keys() == {"1", "4"}
    assert document["experts_touched"]["1"] == 2.0 < document["experts_touched"]["4"]
