"""Linear layers whose weights oneDNN has laid out for small batches, for decoding on a CPU.

A decoding step multiplies a few rows by every weight of the model, so it is bound by how fast the weights stream from
memory. The stock matrix product reads them in an order that suits large batches; the prepacked layout reads them
once, in cache-line blocks.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
PACKED_FOR_ROWS = 4  # the number of rows oneDNN chooses the layout for; one layout serves all batch sizes


class PackedLinear(nn.Module):
    """y = x W^T + b with W prepacked; inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), PACKED_FOR_ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        return torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether linear layers of this type and place are prepacked."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def can_pack(linear: nn.Linear) -> bool:
    return type(linear) is nn.Linear and packs(linear.weight.dtype, linear.weight.device)


class HalfWeightLinear(nn.Module):
    """y = x W^T + b in float32 with W stored in float16: half the bytes to stream; inference only.

    A row's result does not depend on the other rows. Weights are rounded to 11 bits, so logits move a little.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        bias = None if linear.bias is None else linear.bias.detach()
        self.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach().contiguous(), bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        return torch.ops.quantized.linear_dynamic_fp16(inputs, self.packed)


def pack_linear_layers(model: nn.Module, half_weights: bool = False) -> nn.Module:
    """A view of `model` with prepacked linear layers where that is possible; `model` itself keeps its own.

    Parameters that are not packed (embeddings, norms) are shared with `model`. `half_weights` stores the packed weights
    in float16 where the processor's FBGEMM kernels exist.
    """
    if isinstance(model, nn.Linear):
        if not can_pack(model):
            return model
        narrowed = half_weights and HAS_FBGEMM and model.weight.dtype == torch.float32
        return HalfWeightLinear(model) if narrowed else PackedLinear(model)
    view = copy.copy(model)
    view._modules = {
        name: module and pack_linear_layers(module, half_weights) for name, module in model._modules.items()
    }
    return view
