"""What a run takes in parameters, bytes and seconds, from configs alone.

Models are built on the meta device: shapes without memory. Seconds are estimates from matrix products only, at the
speed that this machine shows for them now; Python, attention and data handling come on top.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pipeline.core.cache import layer_types
from pipeline.core.cost_model import Costs
from pipeline.core.errors import PipelineError
from pipeline.core.linear import packs
from pipeline.core.models import quiet_transformers, resolve_dtype
from pipeline.core.replay import LENGTH_STEP

if TYPE_CHECKING:  # their modules import the Trainer, and with it much else
    from pipeline.core.evaluation_settings import EvaluateConfig
    from pipeline.core.training import DistillConfig

GIB = 1 << 30
QUANTIZED_BYTES = {"8bit": 1.0, "4bit": 0.5 + 4 / 64}  # per weight; 4 bit: one float32 scale per 64 weights
WINDOWS = {
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}  # kind of layer -> in a config
LOSS_COPIES = 6  # of the logits, alive together at the peak
SPEED_SECONDS = 0.3  # spent on one measurement of matrix products
SPEED_WIDTH, SPEED_MATRICES = 2048, 16  # together larger than a processor's caches, as a model's weights are
SPEED_ROWS = 512  # more rows are no faster per row


def meta_model(config: PreTrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model that `config` describes, without weights.

    Raises `PipelineError` when transformers has no causal language model for it, or one whose forward pass takes no
    positions or no cache, which decoding needs.
    """
    name = getattr(config, "name_or_path", "") or config.model_type
    remedy = "choose a decoder-only transformer that AutoModelForCausalLM loads."
    try:
        with torch.device("meta"), quiet_transformers():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a model's constructor raises about its config
        line = " ".join(str(error).split())[:200]
        raise PipelineError(f"{name}: no model can be built from its configuration: {line}", remedy) from error
    taken = inspect.signature(type(model).forward).parameters.keys()
    missing = [names[0] for names in (("position_ids",), ("past_key_values", "cache")) if not taken & set(names)]
    if missing:
        raise PipelineError(f"{name}: its forward pass takes no {' and no '.join(missing)}.", remedy)
    return model


def active_parameters(model: PreTrainedModel, head_tokens: int | None = None, tokens: int = 1) -> int:
    """Weights that the `tokens` tokens of a pass are multiplied with: no embedding that is only looked up, of the output
    head only `head_tokens` rows if given, and no experts that none of the tokens chooses, each being equally likely."""
    text = model.config.get_text_config()
    total = 0
    for name, parameter in model.named_parameters():
        size = parameter.numel()
        if ".experts." in name and parameter.dim() == 3:
            experts = parameter.shape[0]
            chosen = getattr(text, "num_experts_per_tok", experts)
            size = round(size * (1 - (1 - chosen / experts) ** tokens))
        total += size
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding is not head:
        total -= embedding.numel()
    if head_tokens is not None:
        total -= max(0, head.shape[0] - head_tokens) * head.shape[1]
    return total


def linear_parameters(model: PreTrainedModel) -> int:
    """Weights in linear layers other than the output head: what bitsandbytes quantises."""
    head = model.get_output_embeddings()
    layers = (module for module in model.modules() if isinstance(module, nn.Linear) and module is not head)
    return sum(layer.weight.numel() for layer in layers)


def weight_bytes(model: PreTrainedModel, dtype: torch.dtype, quantization: str = "none") -> int:
    """Bytes of the loaded weights."""
    return _bytes(model.num_parameters(), model, dtype, quantization)


def read_bytes(
    model: PreTrainedModel,
    dtype: torch.dtype,
    quantization: str = "none",
    head_tokens: int | None = None,
    tokens: int = 1,
) -> int:
    """Bytes of weights that a pass over `tokens` tokens reads; `head_tokens`: rows of the output head, None for all."""
    return _bytes(active_parameters(model, head_tokens, tokens), model, dtype, quantization)


def _bytes(parameters: int, model: PreTrainedModel, dtype: torch.dtype, quantization: str) -> int:
    """Bytes of `parameters` weights of `model`, its linear layers among them."""
    quantized = 0 if quantization == "none" else linear_parameters(model)
    return (parameters - quantized) * dtype.itemsize + round(quantized * QUANTIZED_BYTES.get(quantization, 0))


def packed_bytes(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of the second copy of the linear layers that decoding on a CPU prepares."""
    if not packs(dtype, device):
        return 0
    return (linear_parameters(model) + model.get_output_embeddings().weight.numel()) * dtype.itemsize


def kv_cache_bytes(config: PreTrainedConfig, rows: int, positions: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values of all layers for `rows` sequences of `positions` tokens each, as our decoder allocates them:
    whole also where a layer sees a window only, so that rolling back is free (see `pipeline.core.cache`)."""
    return config.get_text_config().num_hidden_layers * rows * _layer_bytes(config, positions, dtype)


def served_cache_bytes(config: PreTrainedConfig, rows: int, positions: int, dtype: torch.dtype) -> int:
    """The same in a serving engine, which holds of a layer with sliding-window or chunked attention no more positions than
    its window. Raises `PipelineError` for a model whose layers keep something else than keys and values."""
    text = config.get_text_config()
    windows = [getattr(text, WINDOWS[kind]) if kind in WINDOWS else None for kind in layer_types(config)]
    return rows * sum(_layer_bytes(config, min(positions, window or positions), dtype) for window in windows)


def _layer_bytes(config: PreTrainedConfig, positions: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of `positions` tokens in one layer, room for whole steps of a cache's growth."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = 2 * heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    if latent := getattr(text, "kv_lora_rank", None):  # latent attention stores one compressed vector and its position
        width = latent + text.qk_rope_head_dim
    capacity = -(-positions // LENGTH_STEP) * LENGTH_STEP
    return capacity * width * dtype.itemsize


def optimizer_bytes(parameters: int, optimizer: str = "adamw") -> int:
    """Bytes of float32 weights, their gradients and the two moments of AdamW, each in 4 bytes or (adamw_8bit) in 1."""
    return parameters * (8 + 2 * {"adamw": 4, "adamw_8bit": 1}[optimizer])


def checkpoint_bytes(parameters: int) -> int:
    """Bytes of one training checkpoint: float32 weights and the two moments of AdamW."""
    return 12 * parameters


def activation_bytes(config: PreTrainedConfig, tokens: int, dtype: torch.dtype) -> int:
    """Bytes kept for the backward pass over `tokens` tokens without recomputation, output head and loss left out.

    17 values per token, unit of width and layer (34 bytes in 16 bits: Korthikanti et al. 2022, without the attention
    matrix, which fused attention does not store).
    """
    text = config.get_text_config()
    return tokens * 17 * text.hidden_size * text.num_hidden_layers * dtype.itemsize


def loss_bytes(tokens: int, columns: int) -> int:
    """Bytes of the float32 copies of `tokens` x `columns` logits that a loss and its gradient make."""
    return LOSS_COPIES * 4 * tokens * columns


def answer_bytes(tokens: int, top_logprobs: int) -> int:
    """Bytes of stored answers before compression: id and log-probability of each token and of its alternatives."""
    return tokens * (8 + 6 * top_logprobs)


@dataclass
class Workload:
    """How much the stages process at most."""

    prompts: int  # of all splits
    train_prompts: int
    prompt_tokens: int  # of a longest prompt
    answer_tokens: int  # of a longest answer
    rows: int  # decoded together by generate
    decoded_tokens: int  # decoded one by one by evaluate, drafts and plain decoding together


@dataclass
class Pair:
    """Target and draft without weights, and how they would run."""

    target: PreTrainedModel
    draft: PreTrainedModel
    device: torch.device
    target_dtype: torch.dtype
    draft_dtype: torch.dtype
    quantization: str  # of the target: none | 8bit | 4bit

    def generate_memory(self, rows: int, positions: int) -> dict[str, int]:
        """Bytes while `rows` sequences of up to `positions` tokens are decoded together, by what takes them."""
        packed = packed_bytes(self.target, self.target_dtype, self.device) if self.quantization == "none" else 0
        return {
            "target": weight_bytes(self.target, self.target_dtype, self.quantization) + packed,
            "cache": kv_cache_bytes(self.target.config, rows, positions, self.target_dtype),
            "logits": _logits_bytes(self.target, rows),
        }

    def serving_memory(self, rows: int, positions: int) -> dict[str, int]:
        """Bytes of weights and caches where `rows` requests of up to `positions` tokens are served together.

        As an engine on an accelerator holds them: without the second copy that decoding on a CPU makes, and of layers with
        a window what it shows.
        """
        return {
            "target weights": weight_bytes(self.target, self.target_dtype, self.quantization),
            "target cache": served_cache_bytes(self.target.config, rows, positions, self.target_dtype),
            "draft weights": weight_bytes(self.draft, self.draft_dtype),
            "draft cache": served_cache_bytes(self.draft.config, rows, positions, self.draft_dtype),
        }

    def requests_that_fit(self, memory_bytes: float, positions: int) -> tuple[int, int]:
        """Requests of `positions` tokens that `memory_bytes` can serve together: without the draft, and with it."""
        needs = self.serving_memory(1, positions)
        left = memory_bytes - needs["target weights"]
        alone = left // needs["target cache"]
        both = (left - needs["draft weights"]) // (needs["target cache"] + needs["draft cache"])
        return max(0, int(alone)), max(0, int(both))

    def costs_by_bytes(
        self, rows: int, positions: int, lengths: Sequence[int], head_tokens: int, half_weights: bool
    ) -> Costs:
        """What passes cost where time goes with the bytes that they read, in bytes in place of seconds.

        A pass reads its weights once, and the caches of `rows` requests of `positions` tokens. So a dense target checks
        k + 1 tokens as fast as one, v(k) = 1, which holds as long as arithmetic keeps up with memory. The draft runs a
        head of `head_tokens` rows, with `half_weights` on a CPU in half as many bytes.
        """
        needs = self.serving_memory(rows, positions)
        draft = read_bytes(self.draft, self.draft_dtype, head_tokens=head_tokens, tokens=rows)
        if half_weights and packs(self.draft_dtype, self.device):
            draft /= 2
        passes = {
            k: read_bytes(self.target, self.target_dtype, self.quantization, tokens=rows * (k + 1))
            for k in (0, *lengths)
        }
        cached = {k: weights + needs["target cache"] for k, weights in passes.items()}
        return Costs(draft + needs["draft cache"], cached)

    def distill_memory(self, config: DistillConfig, positions: int) -> dict[str, int]:
        """Bytes while the draft is trained, in float32 with autocast to the device's own dtype, by what takes them.

        `positions`: tokens of a longest prompt with its answer in the on-policy phase.
        """
        rows = self.draft.get_output_embeddings().weight.shape[0]
        whole = config.target == "online" or config.sampled_rows is None
        columns = rows if whole else min(rows, config.head_tokens + config.sampled_rows)
        dtype = resolve_dtype("auto", self.device)
        tokens = config.tokens_per_forward
        needs = {
            "weights, gradients and optimizer": optimizer_bytes(self.draft.num_parameters(), config.optimizer),
            "activations": activation_bytes(self.draft.config, tokens, dtype),
            "loss": loss_bytes(min(tokens, config.chunk_tokens), columns),
            "target": weight_bytes(self.target, self.target_dtype, self.quantization) * config.target_in_loop,
            "reference draft": weight_bytes(self.draft, torch.float32) * (config.selected_share < 1),
        }
        if config.on_policy.steps:  # TRL holds the logits of all tokens at once
            tokens = config.on_policy.prompts_per_step * positions
            generated = config.on_policy.prompts_per_step * config.on_policy.max_new_tokens
            needs["activations"] = max(needs["activations"], activation_bytes(self.draft.config, tokens, dtype))
            needs["loss"] = max(needs["loss"], loss_bytes(generated, rows))
            needs["weights before the on-policy phase"] = weight_bytes(self.draft, torch.float32)
        return needs

    def evaluate_memory(
        self,
        tokens_per_forward: int,
        positions: int,
        batch: int = 1,
        others: Sequence[PreTrainedModel] = (),
        everywhere: bool = False,
    ) -> dict[str, int]:
        """Bytes while plain decoding, prompt lookup, the draft before and after distillation and the drafts `others` share
        the target at batch size 1, and plain decoding and the draft, or with `everywhere` all of them, at batch size `batch`,
        by what takes them.

        In half precision the models are also copied to float32, for the check of losslessness.
        """
        models = ((self.target, self.target_dtype), (self.draft, self.draft_dtype))
        drafts, full = [self.draft, self.draft, *others], torch.float32
        target_cache = kv_cache_bytes(self.target.config, 1, positions, self.target_dtype)
        copies = sum(weight_bytes(model, full) + packed_bytes(model, full, self.device) for model, _ in models)
        return {
            "target": self.generate_memory(1, positions)["target"],
            "drafts": sum(
                weight_bytes(model, self.draft_dtype) + packed_bytes(model, self.draft_dtype, self.device)
                for model in drafts
            ),
            "float32 copies": 0 if self.target_dtype == full else copies,
            "caches": (2 + len(drafts)) * target_cache
            + sum(kv_cache_bytes(model.config, 1, positions, self.draft_dtype) for model in drafts),
            "caches at the largest batch": (2 + len(drafts) if everywhere else 2) * batch * target_cache
            + sum(
                kv_cache_bytes(model.config, batch, positions, self.draft_dtype)
                for model in (drafts if everywhere else drafts[:1])
            ),
            "logits": _logits_bytes(self.target, tokens_per_forward),
        }

    def seconds(self, work: Workload, distill: DistillConfig) -> dict[str, float]:
        """Seconds of matrix products per stage: 2 FLOPs per active weight and token, 6 in training (forward pass,
        gradients of inputs and of weights). Evaluate is counted as if drafts saved nothing."""
        target = 2 * active_parameters(self.target)
        draft = 6 * active_parameters(self.draft, distill.head_tokens)
        many = matmul_speed(SPEED_ROWS, self.target_dtype, self.device)
        batch = matmul_speed(work.rows, self.target_dtype, self.device)
        alone = matmul_speed(1, self.target_dtype, self.device)
        trained = distill.epochs * work.train_prompts * (work.prompt_tokens + work.answer_tokens)
        return {
            "generate": work.prompts * target * (work.prompt_tokens / many + work.answer_tokens / batch),
            "distill": draft * trained / many,
            "evaluate": target * work.decoded_tokens / alone,
        }


def _logits_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Two float32 copies of the logits of a pass."""
    return 2 * 4 * tokens * model.get_output_embeddings().weight.shape[0]


def decoded_tokens(config: EvaluateConfig, golden: dict[str, int], domain: str) -> int:
    """Tokens that evaluate decodes one by one; `golden`: prompts of each domain, `domain` the target domain."""
    others = sum(min(config.timed_prompts_other, count) for name, count in golden.items() if name != domain)
    own = min(config.timed_prompts, golden[domain])
    compared = min(config.baseline_prompts, own) + (others if config.baselines_everywhere else 0)
    baselines = (2 + len(config.siblings)) * compared
    timed = 2 * (own + others) + baselines
    for prompts, conditions in (
        (config.sweep_prompts, config.draft_lengths),
        (config.temperature_prompts, config.temperatures),
        (config.batch_prompts, config.batch_sizes),
    ):
        candidates = 4 + len(config.siblings) if config.baselines_everywhere else 2
        most = config.condition_prompts_other if prompts else 0
        elsewhere = [min(most, count) for name, count in golden.items() if name != domain]
        timed += candidates * sum([min(prompts, golden[domain]), *elsewhere]) * len(conditions)
    runs = timed * config.repeats + config.reference_prompts + config.dev_prompts
    return runs * config.max_new_tokens + 2 * config.lossless_prompts * config.lossless_new_tokens


@torch.inference_mode()
def matmul_speed(rows: int, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of products of `rows` tokens with weights, measured for about a third of a second.

    With few rows this is the speed at which weights come out of memory, with many that of arithmetic.
    """
    inputs = torch.ones(min(rows, SPEED_ROWS), SPEED_WIDTH, dtype=dtype, device=device)
    weights = torch.full((SPEED_MATRICES, SPEED_WIDTH, SPEED_WIDTH), 0.01, dtype=dtype, device=device)
    F.linear(inputs, weights[0])
    _synchronize(device)
    products, started = 0, time.perf_counter()
    while time.perf_counter() - started < SPEED_SECONDS:
        F.linear(inputs, weights[products % SPEED_MATRICES])
        products += 1
    _synchronize(device)
    return 2 * inputs.shape[0] * SPEED_WIDTH**2 * products / (time.perf_counter() - started)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory_bytes(device: torch.device, all_devices: bool = False) -> int | None:
    """Bytes that weights can still take on `device`, or on all accelerators together; None where it cannot be told.

    On a CPU the memory that Linux calls available, or what the container's limit leaves if that is less.
    """
    if device.type == "cuda":
        devices = range(torch.cuda.device_count()) if all_devices else [device]
        return sum(torch.cuda.mem_get_info(index)[0] for index in devices)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no such group, or the limit "max"
        return available
    return min(available, limit - used)
