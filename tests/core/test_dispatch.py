"""A target that is spread out, over processes or between memory and disk, gives the tokens of one that is whole."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from tiny_models import noisy_copy, tiny_llama, uncached_greedy
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline.core.decoding import DecodeConfig, Decoder, decode
from pipeline.core.drafters import ModelDrafter
from pipeline.core.errors import PipelineError
from pipeline.core.linear import PackedLinear, can_pack, is_dispatched, pack_linear_layers

PROMPTS = [[5], [3, 4], [index * 7 % 100 for index in range(20)]]
TOKENS = 12


def runs(target: PreTrainedModel, draft: PreTrainedModel) -> dict[str, list[list[int]]]:
    """Tokens of PROMPTS, greedy and sampled, plain and with `draft`."""
    found = {}
    for temperature in (0.0, 1.0):
        config = DecodeConfig(draft_length=3, max_new_tokens=TOKENS, temperature=temperature)
        for name, drafter in (("plain", None), ("draft", draft)):
            result = decode(target, drafter, PROMPTS, config, seed=7)
            found[f"{name} {temperature}"] = [sequence.token_ids for sequence in result.sequences]
            assert drafter is None or 0 < result.stats.accepted < result.stats.drafted
    return found


def run_shard(rank: int, folder: Path, port: int) -> None:
    """One of two processes that hold half of the target each, and the whole draft."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    target = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    weight = target.model.layers[0].self_attn.q_proj.weight
    facts = {
        "sharded": isinstance(weight, DTensor),
        "rows": len(weight.to_local()),
        "packable": can_pack(target.lm_head),
    }
    draft = noisy_copy(AutoModelForCausalLM.from_pretrained(folder).eval(), 0.02)
    (folder / f"{rank}.json").write_text(json.dumps({**facts, "runs": runs(target, draft)}))
    torch.distributed.destroy_process_group()


def test_two_tensor_parallel_processes_decode_like_one(tmp_path):
    """Each process drafts with its own whole draft and verifies with half of the target's heads and channels."""
    target = tiny_llama(std=0.3)
    target.save_pretrained(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run_shard, (tmp_path, port), nprocs=2)
    shards = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert shards[0] == shards[1]
    assert (shards[0]["sharded"], shards[0]["rows"], shards[0]["packable"]) == (True, 32, False)
    assert shards[0]["runs"] == runs(target, noisy_copy(target, 0.02))
    assert shards[0]["runs"]["plain 0.0"] == [uncached_greedy(target, prompt, TOKENS) for prompt in PROMPTS]


MAPS = {
    "a layer on disk": {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"},
    "all but the norm on disk": {"model.embed_tokens": "disk", "model.layers.0": "disk", "model.layers.1": "disk"},
}
HEADS = {"a layer on disk": "cpu", "all but the norm on disk": "disk"}


@pytest.mark.parametrize("name", MAPS)
def test_layers_that_accelerate_fetches_from_disk_decode_like_those_in_memory(name, tmp_path):
    target = tiny_llama(std=0.3, tie_word_embeddings=False)
    draft, expected = noisy_copy(target, 0.02), runs(target, noisy_copy(target, 0.02))
    places = {**MAPS[name], "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": HEADS[name]}
    dispatched = dispatch_model(target, places, main_device="cpu", offload_dir=str(tmp_path))
    assert dispatched.model.layers[1].self_attn.q_proj.weight.device.type == "meta"
    assert runs(dispatched, draft) == expected
    whole = tiny_llama(std=0.3, tie_word_embeddings=False)
    drafted = decode(whole, dispatched, PROMPTS, DecodeConfig(draft_length=3, max_new_tokens=TOKENS))
    assert [sequence.token_ids for sequence in drafted.sequences] == expected["plain 0.0"]
    assert drafted.stats.accepted == drafted.stats.drafted, "an exact copy, wherever its layers lie"


def test_a_trimmed_head_needs_a_whole_draft(tmp_path):
    draft = tiny_llama()
    places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    dispatch_model(draft, {**places, "lm_head": "cpu"}, main_device="cpu", offload_dir=str(tmp_path))
    with pytest.raises(PipelineError, match="spread over devices.*without device_map"):
        Decoder(tiny_llama(), ModelDrafter(draft, [1, 2, 3]), DecodeConfig(draft_length=2, max_new_tokens=4))


def test_a_linear_layer_that_is_hooked_or_dispatched_is_not_replaced():
    """Its copy would run without what was attached to it."""

    def layer() -> nn.Linear:
        return nn.Linear(16, 16)

    listened, prepared, dispatched, plain = layer(), layer(), layer(), layer()
    seen = []
    listened.register_forward_hook(lambda *_: seen.append("after"))
    prepared.register_forward_pre_hook(lambda *_: seen.append("before"))
    dispatched.forward = lambda inputs: seen.append("instead") or inputs
    view = pack_linear_layers(nn.Sequential(listened, prepared, dispatched, plain))
    with torch.inference_mode():
        view(torch.zeros(1, 16))
    assert seen == ["after", "before", "instead"]
    assert [isinstance(module, PackedLinear) for module in view] == [False, False, False, can_pack(plain)]


def test_below_a_dispatched_module_nothing_is_packed():
    """Its forward runs its own children: packed ones beside them would be memory for nothing."""
    model = tiny_llama()
    block = model.model.layers[0].mlp
    block.forward = type(block).forward.__get__(block)
    view = pack_linear_layers(model)
    assert is_dispatched(block) and view.model.layers[0].mlp is block
    assert isinstance(view.model.layers[1].mlp.down_proj, PackedLinear) == can_pack(block.down_proj)
