"""How many experts of a mixture a pass over several tokens touches.

A decoding step streams the weights it needs from memory. One token needs `num_experts_per_tok` experts of each layer; the
k + 1 tokens of a verification choose separately and together need more, so on such a target a verification costs more
than a plain step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.core.cache import input_device


def routers(model: nn.Module) -> list[nn.Module]:
    """The modules that choose each token's experts, one per layer with experts; none in a dense model.

    By transformers' convention: a `gate` or `router` that knows `top_k` and `num_experts`.
    """
    found = []
    for name, module in model.named_modules():
        chooses = name.rpartition(".")[2] in ("gate", "router") and hasattr(module, "top_k")
        if chooses and getattr(module, "num_experts", 0):
            found.append(module)
    return found


def chosen_experts(router: nn.Module, output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """What a router's output says, bool [tokens, experts].

    Routers return the chosen ids beside logits and weights, or, as Llama 4's, logits and scores of all experts.
    """
    tensors = output if isinstance(output, tuple) else (output,)
    ids = [tensor for tensor in tensors if not tensor.is_floating_point()]
    chosen = ids[0] if ids else tensors[-1].topk(router.top_k, dim=-1).indices
    chosen = chosen.reshape(-1, router.top_k)
    return torch.zeros(len(chosen), router.num_experts, dtype=torch.bool, device=chosen.device).scatter(1, chosen, True)


@torch.inference_mode()
def experts_touched(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], tokens: Sequence[int]
) -> dict[int, float] | None:
    """Mean number of distinct experts per layer that a pass over n consecutive tokens touches, for each n in `tokens`.

    The mean is over the layers with experts and all stretches of n tokens of `texts` (token ids). Where no text is that
    long, n is left out. None for a dense model, or one whose routers `routers` does not find.
    """
    layers = routers(model)
    if not layers:
        return None
    counts: dict[int, list[Tensor]] = {count: [] for count in tokens}
    for text in texts:
        choices = _choices(model, layers, text)
        for count in tokens:
            if len(text) >= count:
                windows = choices.unfold(1, count, 1)  # [layers, stretches, experts, n]
                counts[count].append(windows.any(dim=-1).sum(dim=-1).flatten())
    return {count: torch.cat(found).double().mean().item() for count, found in counts.items() if found}


def _choices(model: PreTrainedModel, layers: list[nn.Module], text: Sequence[int]) -> Tensor:
    """The experts that each layer chooses for each token of `text`, bool [layers, tokens, experts]."""
    choices: dict[nn.Module, Tensor] = {}

    def note(router: nn.Module, _inputs: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
        choices[router] = chosen_experts(router, output).cpu()

    handles = [router.register_forward_hook(note) for router in layers]
    try:
        model(torch.tensor([list(text)], device=input_device(model)), use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack([choices[router] for router in layers])
