"""Linear layers whose weights oneDNN has laid out for small batches, for decoding on a CPU.

A decoding step multiplies a few rows by every weight of the model, so it is bound by how fast the weights stream from
memory. The stock product of a few rows copies the weights into blocks first, in every call; the prepacked layout is read
as it lies. A single float32 row is the exception: a plain matrix-vector product streams faster.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as linear_product

HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
INT8_COLUMNS = 16  # the 8-bit kernel reads so many inputs at a time, also beyond the end of a row
FEW_ROWS = 4  # up to so many rows, 8-bit weights are multiplied faster than bfloat16 ones
NARROW_INPUTS = 1024  # dot products shorter than this keep up with the memory only if many outputs are summed at once
PACKED_FOR_ROWS = 4  # the number of rows oneDNN chooses the layout for; one layout serves all batch sizes


class PackedLinear(nn.Module):
    """y = x W^T + b with W prepacked, and W as it multiplies single rows; inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight = linear.weight.detach().contiguous()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
        self.single_row_weight = _for_single_rows(weight) if weight.dtype == torch.float32 else None
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        if self.single_row_weight is not None and inputs.numel() == self.in_features:
            return linear_product(inputs, self.single_row_weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")


def _for_single_rows(weight: Tensor) -> Tensor:
    """[outputs, inputs] in the order in which memory should hold it for matrix-vector products; shared where it does."""
    outputs, inputs = weight.shape
    return weight.t().contiguous().t() if inputs < NARROW_INPUTS and inputs < outputs else weight


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether linear layers of this type and place are prepacked."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_own_forward(module: nn.Module) -> bool:
    """Whether calling `module` runs its class's forward and nothing else: no hooks, no forward put in its place."""
    return not (module._forward_hooks or module._forward_pre_hooks or is_dispatched(module))


def can_pack(linear: nn.Linear) -> bool:
    """Whether a prepacked copy can stand in for `linear`: a stock layer with plain weights, all here, and no hooks."""
    if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter or not has_own_forward(linear):
        return False
    return packs(linear.weight.dtype, linear.weight.device)


def is_dispatched(module: nn.Module) -> bool:
    """Whether `module` runs a forward of its own instead of its class's, as tensor parallelism and accelerate install it.

    That forward belongs to this object: a view of the module would still run it, and with it the module's own children.
    """
    return "forward" in vars(module)


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


class Int8WeightLinear(nn.Module):
    """y = x W^T + b in bfloat16 with W rounded to 8 bits, one scale per output: half the bytes to stream; inference only.

    With more than `FEW_ROWS` rows, where arithmetic counts and not the stream, the same rounded W is multiplied in
    bfloat16, so that a row means the same in every batch.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(dim=1).clamp(min=1e-12) / 127
        self.rounded = (weight / scales[:, None]).round().to(torch.int8)
        self.scales = scales.to(linear.weight.dtype)
        whole = (self.rounded * self.scales[:, None]).contiguous()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(whole, PACKED_FOR_ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        rows = inputs.numel() // self.in_features
        if rows > FEW_ROWS:
            return torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")
        outputs = torch._weight_int8pack_mm(inputs.reshape(rows, self.in_features), self.rounded, self.scales)
        outputs = outputs.view(*inputs.shape[:-1], self.out_features)
        return outputs if self.bias is None else outputs + self.bias


def pack_linear_layers(model: nn.Module, half_weights: bool = False) -> nn.Module:
    """A view of `model` with prepacked linear layers where that is possible; `model` itself keeps its own.

    Parameters that are not packed (embeddings, norms) are shared with `model`. `half_weights` stores the packed weights
    in half as many bytes: float32 ones in float16 where the processor's FBGEMM kernels exist, bfloat16 ones in 8 bits.
    What tensor parallelism or accelerate has dispatched stays as it is.
    """
    if is_dispatched(model):
        return model
    if isinstance(model, nn.Linear):
        if not can_pack(model):
            return model
        if half_weights and model.weight.dtype == torch.float32 and HAS_FBGEMM:
            return HalfWeightLinear(model)
        if half_weights and model.weight.dtype == torch.bfloat16 and model.in_features % INT8_COLUMNS == 0:
            return Int8WeightLinear(model)
        return PackedLinear(model)
    view = copy.copy(model)
    view._modules = {
        name: module and pack_linear_layers(module, half_weights) for name, module in model._modules.items()
    }
    return view
