"""A causal language model as decoding runs it: the same function of the same weights, in faster parts.

`decoding_view` copies the tree of modules and exchanges parts that decoding spends its time in; it shares all weights but
those of prepacked linear layers, which on a CPU exist twice. The parts:
linear layers (`pipeline.core.linear`), attention (`pipeline.core.attention`) and norms. The model itself and its config
stay as they are.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm
from transformers import PreTrainedConfig, PreTrainedModel

from pipeline.core.attention import GROUPED
from pipeline.core.linear import has_own_forward, is_dispatched, pack_linear_layers

PROOF_SCALES = (0.01, 1.0, 100.0)  # a replacement must agree on random inputs of these sizes, so that epsilon shows


class PackedNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + epsilon) * weight, in one call; inference only.

    On a CPU `rms_norm` is composed of ten small operations. The mean of (x, -x) is 0 and its variance mean(x^2), so there
    layer norm, which is one operation, gives the same.
    """

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.epsilon = epsilon
        self.mirrored = torch.cat([weight, weight]) if weight.device.type == "cpu" else None

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., features] -> [..., features]"""
        if self.mirrored is None:
            return rms_norm(inputs, self.weight.shape, self.weight, self.epsilon)
        both = layer_norm(torch.cat((inputs, -inputs), dim=-1), self.mirrored.shape, self.mirrored, None, self.epsilon)
        return both[..., : inputs.shape[-1]]


@torch.inference_mode()
def pack_norm(norm: nn.Module) -> nn.Module:
    """A `PackedNorm` where it is shown to compute what `norm` does (a weight of w, or of 1 + w), else `norm` itself."""
    parameters = dict(norm.named_parameters())
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not has_own_forward(norm) or list(parameters) != ["weight"] or not isinstance(epsilon, float):
        return norm
    weight = norm.weight.detach()
    if type(norm.weight) is not nn.Parameter or weight.dim() != 1 or weight.is_meta:
        return norm
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(len(PROOF_SCALES), 8, len(weight), generator=generator)
    inputs = (inputs * torch.tensor(PROOF_SCALES)[:, None, None]).to(weight.device, weight.dtype)
    expected = norm(inputs)
    tolerance = 8 * torch.finfo(weight.dtype).eps
    for candidate in (PackedNorm(weight, epsilon), PackedNorm(1 + weight, epsilon)):
        if torch.allclose(candidate(inputs), expected, rtol=tolerance, atol=tolerance):
            return candidate
    return norm


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm")


def _exchange_parts(module: nn.Module, grouped: bool, configs: dict) -> nn.Module:
    """`module` with packed norms and, if `grouped`, configs that name grouped attention; `configs` is deepcopy's memo."""
    if is_dispatched(module):
        return module
    if _is_norm(module):
        return pack_norm(module)
    view = copy.copy(module)
    config = module.__dict__.get("config")
    if grouped and isinstance(config, PreTrainedConfig) and config._attn_implementation == "sdpa":
        view.config = copy.deepcopy(config, configs)
        view.config._attn_implementation = GROUPED
    view._modules = {
        name: child and _exchange_parts(child, grouped, configs) for name, child in module._modules.items()
    }
    return view


def decoding_view(model: PreTrainedModel, half_weights: bool = False) -> PreTrainedModel:
    """A view of `model` for decoding; `half_weights` as for `pack_linear_layers`."""
    grouped = model._supports_attention_backend
    return pack_linear_layers(_exchange_parts(model, grouped, {}), half_weights)
