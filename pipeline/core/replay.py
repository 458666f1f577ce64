"""Functions of tensors that are called again and again on the same shapes: on CUDA each is captured once and replayed.

A decoding step launches hundreds of small kernels; replaying a captured graph launches them at once, without Python
(torch.cuda.CUDAGraph). For that, shapes are padded to few sizes there. On a CPU the same function simply runs, on exact
shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

LENGTH_STEP = 32  # without replay: a cache grows, and its visible part is cut, in multiples of this many positions
SHORTEST_REPLAYED = 256  # with replay: lengths are powers of two from here on, so that few graphs serve a long answer
WARM_UP_CALLS = 2  # before a capture, so that libraries have chosen their kernels and made their workspaces

logger = logging.getLogger(__name__)


def replays(device: torch.device) -> bool:
    """Whether functions on this device are captured and replayed."""
    return device.type == "cuda"


def padded_rows(rows: int, slots: int, device: torch.device) -> int:
    """The number of rows that a pass over `rows` of at most `slots` runs with."""
    return min(1 << (rows - 1).bit_length(), slots) if replays(device) else rows


def padded_length(length: int, device: torch.device) -> int:
    """The number of positions that stands for `length`."""
    if replays(device):
        return max(SHORTEST_REPLAYED, 1 << (length - 1).bit_length())
    return -(-length // LENGTH_STEP) * LENGTH_STEP


class Replayed:
    """`function(*static, *tensors)` -> tensors or None each, for tensors on `device`.

    `static` are plain values that decide what is computed: one capture per combination of them and of the tensors' shapes.
    What a replay returns is overwritten by the next replay of the same capture. A function that cannot be captured, since
    it waits for the device or allocates in a way that graphs do not allow, runs as it is, after one warning; one over a
    model on several devices (`whole` is False) always does.
    """

    def __init__(
        self, function: Callable[..., tuple[Tensor | None, ...]], device: torch.device, whole: bool = True
    ) -> None:
        self.function = function
        self.device = device
        self.captured: dict[tuple, Callable[..., tuple[Tensor | None, ...]]] = {}
        self.fails = not whole

    def __call__(self, static: tuple, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        if self.fails or not replays(self.device):
            return self.function(*static, *tensors)
        key = (static, tuple(tensor if tensor is None else tensor.shape for tensor in tensors))
        if key not in self.captured:
            try:
                self.captured[key] = capture(self.function, static, tensors)
            except RuntimeError as error:
                self.fails = True
                self.clear()
                logger.warning("decoding runs without CUDA graphs: %s", str(error).splitlines()[0])
                return self.function(*static, *tensors)
        return self.captured[key](*tensors)

    def clear(self) -> None:
        """Forget all captures: what they read or write has moved."""
        self.captured.clear()


def capture(
    function: Callable[..., tuple[Tensor | None, ...]], static: tuple, tensors: tuple[Tensor | None, ...]
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Record one call as a CUDA graph; the result replays it on other tensors of the same shapes."""
    inputs = [tensor if tensor is None else tensor.clone() for tensor in tensors]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_CALLS):
            function(*static, *inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function(*static, *inputs)

    def replay(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        for mine, theirs in zip(inputs, tensors, strict=True):
            if mine is not None:
                mine.copy_(theirs)
        graph.replay()
        return outputs

    return replay
