"""Attention of a few queries over a long cache whose keys are shared by groups of query heads.

The usual way repeats every key and value once per query head of its group, in every layer of every pass; the copies cost
more than the attention. Here the queries of a group stand side by side as further queries of the one head they share,
so that keys and values are read where they lie, once.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "grouped"  # the name under which transformers finds `grouped_attention`
FEW_QUERIES = 32  # beyond so many queries per row, repeating the keys costs little against the arithmetic
OTHER_ARITHMETIC = ("softcap", "position_bias")  # arguments of `sdpa` attention that change what is computed


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """`sdpa` attention of transformers, in its signature, with a faster way for few queries.

    query [rows, heads, queries, head_dim]; key and value [rows, key_heads, slots, head_dim]; attention_mask additive or
    boolean [rows, 1, queries, slots]. Returns [rows, queries, heads, head_dim].
    """
    rows, heads, queries, _ = query.shape
    key_heads = key.shape[1]
    usual = attention_mask is not None and attention_mask.shape[1] == 1 and dropout == 0
    if not usual or queries > FEW_QUERIES or any(kwargs.get(name) is not None for name in OTHER_ARITHMETIC):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    group = heads // key_heads
    if group > 1:
        query = query.reshape(rows, key_heads, group * queries, query.shape[-1])
        if queries > 1:
            attention_mask = attention_mask.repeat(1, 1, group, 1)
    output = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(rows, heads, queries, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
