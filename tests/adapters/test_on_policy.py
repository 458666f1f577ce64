"""What TRL samples, masks and computes is what the on-policy phase needs, and what it leaves behind is the draft alone."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dependencies import ROOT
from tiny_answers import answers_of
from tiny_models import chain, noisy_copy, tiny_llama
from tiny_settings import distill_config, on_policy_config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DistillationTrainer

from pipeline.adapters import on_policy
from pipeline.adapters.on_policy import check_on_policy, on_policy_phase, train_on_policy
from pipeline.core.errors import PipelineError

EOS = 2
PROMPTS = [[5], [3, EOS, 4], [9, 8, 7, 6, 5, 4], [11, 12], [17, 16, 15, 14]]


@pytest.fixture(autouse=True)
def float32(monkeypatch):
    monkeypatch.setattr(on_policy, "resolve_dtype", lambda *_: torch.float32)


@pytest.fixture
def seen(monkeypatch):
    """What TRL's loss was given in each step, how many tokens it counted, and its gradient in the draft's head."""
    steps = []
    original = DistillationTrainer._compute_loss

    def spy(self, student, inputs, count):
        result = original(self, student, inputs, count)
        gradient = torch.autograd.grad(result[0], student.lm_head.weight, retain_graph=True)[0]
        half = torch.is_autocast_enabled(result[0].device.type)
        steps.append(SimpleNamespace(**inputs, trained=int(result[2]), gradient=gradient, half_precision=half))
        return result

    monkeypatch.setattr(DistillationTrainer, "_compute_loss", spy)
    return steps


def word_tokenizer(size: int = 100, pad: int | None = None) -> PreTrainedTokenizerFast:
    words = {f"w{index}": index for index in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    padding = {} if pad is None else {"pad_token": f"w{pad}"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"w{EOS}", **padding)


def llama(seed: int = 0, vocabulary: int = 100):
    return tiny_llama(seed, vocabulary=vocabulary, tie_word_embeddings=False)


def gpt2(seed: int = 0):
    """Learned positions: a row that is shifted by its padding is another row."""
    torch.manual_seed(seed)
    shape = {"vocab_size": 100, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.3}
    rest = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": None, "eos_token_id": EOS}
    return GPT2LMHeadModel(GPT2Config(tie_word_embeddings=False, **shape, **rest)).eval()


def train(draft, target, folder, vocabulary=range(100), prompts=PROMPTS, tokenizer=None, **changes) -> list[dict]:
    tokenizer = tokenizer or word_tokenizer(len(vocabulary))
    recipe = distill_config(on_policy=on_policy_config(**{"steps": 1, **changes}))
    named = {f"p{index}": ids for index, ids in enumerate(prompts)}
    return train_on_policy(draft, target, tokenizer, vocabulary, named, recipe, 0, folder)


def divergence(target_logits: np.ndarray, draft_logits: np.ndarray, beta: float) -> np.ndarray:
    """[tokens, vocab] twice -> [tokens]; written from the definition, in float64."""

    def log_softmax(x):
        x = x - x.max(axis=-1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))

    def kl(a, b):
        return (np.exp(a) * (a - b)).sum(axis=-1)

    p, q = log_softmax(target_logits), log_softmax(draft_logits)
    if beta in (0, 1):
        return kl(p, q) if beta == 0 else kl(q, p)
    m = np.log(beta * np.exp(p) + (1 - beta) * np.exp(q))
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


@torch.inference_mode()
def expected_loss(draft, target, step, beta: float, temperature: float, ids: int = 100) -> float:
    """The mean over the answers' tokens, every row alone and without padding, in float64."""
    values = []
    for row in range(len(step.prompt_ids)):
        prompt = step.prompt_ids[row][step.prompt_mask[row].bool()].tolist()
        answer = step.completion_ids[row][step.completion_mask[row].bool()].tolist()
        logits = [
            model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1, :ids].numpy()
            for model in (target, draft)
        ]
        values.extend(divergence(logits[0] / temperature, logits[1] / temperature, beta))
    return float(np.mean(values))


@pytest.mark.parametrize(
    ("family", "beta"), [(llama, 0.0), (llama, 0.1), (llama, 0.5), (llama, 0.9), (llama, 1.0), (gpt2, 0.5)]
)
def test_the_loss_and_its_gradient_are_the_documented_divergence(family, beta, seen, tmp_path):
    """L01: beta 0 is KL(target || draft), 1 is KL(draft || target); padding and its positions play no part."""
    target, draft = family(0), family(1)
    draft64, target64 = copy.deepcopy(draft).double(), copy.deepcopy(target).double()
    rows = train(draft, target, tmp_path, beta=beta, kl_temperature=2.0)
    (step,) = seen
    assert len({int(mask.sum()) for mask in step.prompt_mask}) > 1, "rows are padded"
    assert rows[0]["loss"] == pytest.approx(expected_loss(draft64, target64, step, beta, 2.0), rel=1e-4)
    direction = torch.randn(draft64.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
    ends = []
    for sign in (1, -1):
        moved = copy.deepcopy(draft64)
        moved.lm_head.weight.data += sign * 1e-5 * direction
        ends.append(expected_loss(moved, target64, step, beta, 2.0))
    assert (step.gradient * direction).sum().item() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-3)


def test_half_precision_covers_the_loss(seen, monkeypatch, tmp_path):
    train(llama(1), llama(0), tmp_path / "a")
    monkeypatch.setattr(on_policy, "resolve_dtype", lambda *_: torch.bfloat16)
    train(llama(1), llama(0), tmp_path / "b")
    assert [step.half_precision for step in seen] == [False, True]


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_equal_models_have_no_loss(beta, tmp_path):
    target = llama()
    (row,) = train(copy.deepcopy(target), target, tmp_path, beta=beta)
    assert abs(row["loss"]) < 1e-5


@pytest.mark.parametrize("pad", [None, EOS, 7])
def test_an_answer_is_trained_through_its_first_eos(pad, seen, tmp_path):
    """L04: masks come from lengths. Token 7 is text even where it is the pad token; EOS in a prompt is attended to."""
    draft = chain({3: 4, 4: 5, 5: EOS, EOS: EOS, 6: 7, 7: 8, 8: 6})
    train(
        draft, llama(vocabulary=16), tmp_path, range(16), [[9, EOS, 3], [6]], word_tokenizer(16, pad),
        sampling_temperature=0.02, prompts_per_step=2, max_new_tokens=5,
    )  # fmt: skip
    (step,) = seen
    masked = {
        tuple(step.prompt_ids[row][step.prompt_mask[row].bool()].tolist()):
            step.completion_ids[row][step.completion_mask[row].bool()].tolist()
        for row in range(2)
    }  # fmt: skip
    assert masked == {(9, EOS, 3): [4, 5, EOS], (6,): [7, 8, 6, 7, 8]}
    for row in range(2):
        length = int(step.completion_mask[row].sum())
        assert step.completion_mask[row].tolist() == [1] * length + [0] * (5 - length)
    assert step.trained == 8


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(112, 104), (104, 112), (104, 104)])
def test_padding_rows_are_neither_sampled_nor_compared(target_rows, draft_rows, seen, tmp_path):
    """T01: whatever a padded row holds, one of its two neighbours has the largest logit everywhere."""
    target, draft = llama(0, target_rows), llama(1, draft_rows)
    with torch.no_grad():
        for model in (target, draft):
            model.lm_head.weight[-1], model.lm_head.weight[-2] = 1e3, -1e3
    before = copy.deepcopy(draft)
    rows = train(draft, target, tmp_path, steps=3)
    assert all(int(step.completion_ids.max()) < 100 for step in seen)
    assert rows[0]["loss"] == pytest.approx(expected_loss(before, target, seen[0], 0.5, 1.0), rel=1e-3)
    assert torch.equal(draft.lm_head.weight[100:], before.lm_head.weight[100:])
    assert not torch.equal(draft.lm_head.weight[:100], before.lm_head.weight[:100])


def test_nothing_but_the_weights_of_the_draft_changes(tmp_path):
    """T07"""
    target, draft, tokenizer = llama(0), llama(1), word_tokenizer()
    generation_config = draft.generation_config
    architecture = {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}  # what saving writes anyway
    facts = [draft.config.to_dict() | architecture, target.config.to_dict(), generation_config.to_dict()]
    weights = copy.deepcopy(target.state_dict())
    train(draft, target, tmp_path, tokenizer=tokenizer)
    assert [draft.config.to_dict(), target.config.to_dict(), draft.generation_config.to_dict()] == facts
    assert draft.generation_config is generation_config and not draft.training
    assert tokenizer.pad_token is None
    assert all(torch.equal(weights[name], tensor) for name, tensor in target.state_dict().items())
    assert not {"forward", "get_output_embeddings"} & (vars(draft).keys() | vars(target).keys())


def test_a_killed_phase_ends_with_the_weights_of_an_unbroken_one(monkeypatch, tmp_path):
    target, draft = llama(0), llama(1)
    unbroken, resumed = copy.deepcopy(draft), copy.deepcopy(draft)
    history = train(unbroken, target, tmp_path / "unbroken", steps=5)
    on_step_end = on_policy._Progress.on_step_end

    def killed(self, args, state, control, **kwargs):
        if state.global_step == 4:
            raise KeyboardInterrupt
        on_step_end(self, args, state, control, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(on_policy._Progress, "on_step_end", killed)
        train(draft, target, tmp_path / "killed", steps=5)
    rows = train(resumed, target, tmp_path / "killed", steps=5)
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in history]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in history])
    for ours, theirs in zip(resumed.parameters(), unbroken.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    again = train(copy.deepcopy(draft), target, tmp_path / "killed", steps=5)
    assert again == rows, "nothing is left to do"


@pytest.mark.parametrize(("learning_rate", "kept"), [(3e-3, 1), (1.0, 0)])
def test_the_weights_that_win_on_dev_are_kept(learning_rate, kept, caplog, tmp_path):
    target = llama()
    draft = noisy_copy(target, 0.1)
    offline = copy.deepcopy(draft.state_dict())
    answers = answers_of(target, 12)
    logged = []
    phase = on_policy_config(steps=12, learning_rate=learning_rate, beta=0.0)
    rows = on_policy_phase(
        draft, SimpleNamespace(model=target, tokenizer=word_tokenizer()), answers, answers, list(range(100)), range(100),
        distill_config(on_policy=phase), 0, {"step": 50, "tokens": 1000}, tmp_path, logged.append,
    )  # fmt: skip
    assert [row["tokens"] for row in logged] == [row["tokens"] for row in rows], "each is reported as its step ends"
    assert rows[-1]["on_policy_kept"] == kept
    assert [row["step"] for row in rows] == list(range(51, 63)) and rows[0]["tokens"] > 1000
    unchanged = all(torch.equal(offline[name], tensor) for name, tensor in draft.state_dict().items())
    assert unchanged != bool(kept)
    (line,) = [record.getMessage() for record in caplog.records if "on-policy phase" in record.getMessage()]
    assert f"{rows[-1]['dev_token_acceptance']:.4f} after" in line
    assert line.endswith("the on-policy weights are kept" if kept else "the offline weights are kept")


def test_prompts_that_do_not_fit_are_left_out_or_refused(seen, caplog, tmp_path):
    train(llama(1), llama(0), tmp_path / "a", prompts=[[5], [101], [1] * 510], prompts_per_step=3)
    assert seen[0].prompt_ids.tolist() == [[5]] * 3 and "2 prompts" in caplog.text
    with pytest.raises(PipelineError, match="max_new_tokens"):
        train(llama(1), llama(0), tmp_path / "b", prompts=[[5]], max_new_tokens=512)


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(tmp_path):
    target, draft = llama(0), llama(1)
    target.lm_head.weight.data[3] = float("nan")
    before = copy.deepcopy(draft.state_dict())
    with pytest.raises(PipelineError, match="not finite at step 1, on answers to p0;"):
        train(draft, target, tmp_path, prompts=PROMPTS[:1])
    assert all(torch.equal(before[name], tensor) for name, tensor in draft.state_dict().items())


def test_gradients_that_are_not_finite_stop_with_their_prompts_before_the_weights_change(seen, tmp_path):
    """In the second step: its prompts are those that were answered in it."""
    target, draft, steps = llama(0), llama(1), []

    def broken_in_the_second(gradient):
        steps.append(copy.deepcopy(draft.state_dict()))
        return gradient * float("inf") if len(steps) == 2 else gradient

    draft.model.layers[0].mlp.up_proj.weight.register_hook(broken_in_the_second)
    with pytest.raises(PipelineError, match="gradients are not finite at optimiser step 2, on answers to ") as error:
        train(draft, target, tmp_path, steps=3, prompts_per_step=2)
    named = re.findall(r"\bp(\d)\b", error.value.reason)
    rows = zip(seen[1].prompt_ids, seen[1].prompt_mask, strict=True)
    assert [ids[mask.bool()].tolist() for ids, mask in rows] == [PROMPTS[int(index)] for index in named]
    assert all(torch.equal(steps[1][name], tensor) for name, tensor in draft.state_dict().items())
    assert "distill.on_policy.learning_rate" in error.value.remedy


@pytest.mark.parametrize(
    "change",
    [{"beta": 1e-4}, {"beta": 0.9995}, {"beta": -0.1}, {"beta": float("nan")}, {"steps": -1}, {"learning_rate": 0.0},
     {"sampling_temperature": 0.0}, {"kl_temperature": 0.0}, {"prompts_per_step": 0}, {"max_new_tokens": 0}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(change):
    with pytest.raises(ValueError, match=f"on_policy.{next(iter(change))}"):
        on_policy_config(**change)


def test_the_optimiser_is_that_of_the_recipe(tmp_path):
    recipe = distill_config(
        optimizer="adamw_8bit", weight_decay=0.3, adam_beta2=0.9, max_grad_norm=0.7, on_policy=on_policy_config(steps=3)
    )
    arguments = on_policy._arguments(recipe, [], 0, tmp_path)
    assert (arguments.optim, arguments.weight_decay) == ("adamw_bnb_8bit", 0.3)
    assert (arguments.adam_beta2, arguments.max_grad_norm) == (0.9, 0.7)


def test_several_processes_are_refused(monkeypatch):
    check_on_policy()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PipelineError, match="one process"):
        check_on_policy()


def test_trl_is_imported_only_where_it_is_used():
    code = "import sys; import pipeline.adapters.on_policy; assert 'trl' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
