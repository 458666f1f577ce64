"""Linear layers whose weights oneDNN has laid out for small batches, for decoding on a CPU.

A decoding step multiplies a few rows by every weight of the model, so it is bound by how fast the weights stream from
memory. The stock product of a few rows copies the weights into blocks first, in every call; the prepacked layout is read
as it lies. A single float32 row is the exception: matrix-vector products, one for each thread, stream faster. Layers that
read the same input are one product, since every call costs about as much as streaming a few hundred kilobytes.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
INT8_COLUMNS = 16  # the 8-bit kernel reads so many inputs at a time, also beyond the end of a row
FEW_ROWS = 4  # up to so many rows, 8-bit weights are multiplied faster than bfloat16 ones
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # siblings that transformers gives one input
PACKED_FOR_ROWS = {torch.float32: 16, torch.bfloat16: 4}  # oneDNN chooses one layout for all batch sizes by this one


class PackedLinear(nn.Module):
    """y = x W^T + b with W prepacked; inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight = linear.weight.detach().contiguous()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS[weight.dtype])
        self.shares = thread_shares(weight) if weight.dtype == torch.float32 else None
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        if self.shares is None or inputs.numel() != self.in_features:
            return torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")
        # transposed, a column of strides (1, inputs); one of strides (1, 1) takes the product twice as long
        column = inputs.reshape(1, self.in_features).t()
        outputs = torch.bmm(self.shares, column.expand(len(self.shares), -1, 1))
        outputs = outputs.view(*inputs.shape[:-1], self.out_features)
        return outputs if self.bias is None else outputs + self.bias


def thread_shares(weight: Tensor) -> Tensor:
    """A view [shares, outputs / shares, inputs] of `weight` [outputs, inputs], a share for each thread if that is even."""
    outputs, inputs = weight.shape
    shares = max(count for count in range(1, torch.get_num_threads() + 1) if outputs % count == 0)
    return weight.view(shares, outputs // shares, inputs)


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
        self.packed = torch.ops.mkldnn._reorder_linear_weight(whole, PACKED_FOR_ROWS[whole.dtype])
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        rows = inputs.numel() // self.in_features
        if rows > FEW_ROWS:
            return torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")
        outputs = torch._weight_int8pack_mm(inputs.reshape(rows, self.in_features), self.rounded, self.scales)
        outputs = outputs.view(*inputs.shape[:-1], self.out_features)
        return outputs if self.bias is None else outputs + self.bias


class FusedProjections:
    """Several linear layers of one input as a single product, computed when the first of them is asked for."""

    def __init__(self, packed: nn.Module, widths: list[int]) -> None:
        self.packed = packed
        self.widths = widths
        self.inputs: Tensor | None = None
        self.outputs: tuple[Tensor, ...] = ()

    def output(self, inputs: Tensor, index: int) -> Tensor:
        """The output of layer `index`; the last one's lets go of the others."""
        if inputs is not self.inputs:
            self.inputs, self.outputs = inputs, self.packed(inputs).split(self.widths, dim=-1)
        output = self.outputs[index]
        if index == len(self.widths) - 1:
            self.inputs, self.outputs = None, ()
        return output


class ProjectionPart(nn.Module):
    """One of the layers of a `FusedProjections`; inference only."""

    def __init__(self, linear: nn.Linear, fused: FusedProjections, index: int) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.fused = fused
        self.index = index

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        return self.fused.output(inputs, self.index)


def _fuse(linears: list[nn.Linear], half_weights: bool) -> list[nn.Module]:
    joined = nn.Linear(1, 1, device="meta")
    joined.in_features, joined.out_features = linears[0].in_features, sum(layer.out_features for layer in linears)
    joined.weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in linears]), requires_grad=False)
    biases = [layer.bias.detach() for layer in linears if layer.bias is not None]
    joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
    fused = FusedProjections(_packed(joined, half_weights), [layer.out_features for layer in linears])
    return [ProjectionPart(layer, fused, index) for index, layer in enumerate(linears)]


def _can_fuse(linears: list[nn.Module | None]) -> bool:
    if not all(isinstance(layer, nn.Linear) and can_pack(layer) for layer in linears):
        return False
    kinds = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in linears}
    return len(kinds) == 1


def _packed(linear: nn.Linear, half_weights: bool) -> nn.Module:
    if half_weights and linear.weight.dtype == torch.float32 and HAS_FBGEMM:
        return HalfWeightLinear(linear)
    if half_weights and linear.weight.dtype == torch.bfloat16 and linear.in_features % INT8_COLUMNS == 0:
        return Int8WeightLinear(linear)
    return PackedLinear(linear)


def pack_linear_layers(model: nn.Module, half_weights: bool = False) -> nn.Module:
    """A view of `model` with prepacked linear layers where that is possible; `model` itself keeps its own.

    Parameters that are not packed (embeddings, norms) are shared with `model`. `half_weights` stores the packed weights
    in half as many bytes: float32 ones in float16 where the processor's FBGEMM kernels exist, bfloat16 ones in 8 bits.
    What tensor parallelism or accelerate has dispatched stays as it is.
    """
    if is_dispatched(model):
        return model
    if isinstance(model, nn.Linear):
        return _packed(model, half_weights) if can_pack(model) else model
    view = copy.copy(model)
    fused: dict[str, nn.Module] = {}
    for names in SAME_INPUT:
        linears = [model._modules.get(name) for name in names]
        if _can_fuse(linears):
            fused.update(zip(names, _fuse(linears, half_weights), strict=True))
    view._modules = {
        name: fused.get(name) or (module and pack_linear_layers(module, half_weights))
        for name, module in model._modules.items()
    }
    return view
