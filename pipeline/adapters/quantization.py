"""8-bit and 4-bit targets and optimisers through bitsandbytes, refused early where it cannot run."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.core.errors import PipelineError
from pipeline.core.models import ModelConfig


def quantization_config(config: ModelConfig):
    """The transformers quantisation config for `config.quantization`, or None for full weights.

    Raises `PipelineError`, before any weights load, when bitsandbytes is missing or a probe of it fails.
    """
    if config.quantization == "none":
        return None
    remedy = "set target.quantization=none, or use a machine where bitsandbytes runs."
    _check(f"target.quantization={config.quantization}", lambda found: _probe(found, config.quantization), remedy)
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=config.quantization == "8bit", load_in_4bit=config.quantization == "4bit")


def check_optimizer(optimizer: str) -> None:
    """Raise `PipelineError`, before anything is trained, when distill.optimizer needs bitsandbytes and it cannot run."""
    if optimizer == "adamw_8bit":
        remedy = "set distill.optimizer=adamw, or use a machine where bitsandbytes runs."
        _check(f"distill.optimizer={optimizer}", _probe_optimizer, remedy)


def _check(setting: str, probe: Callable, remedy: str) -> None:
    try:
        import bitsandbytes
    except Exception as error:  # a broken native library raises more than ImportError
        raise PipelineError(f"{setting} needs bitsandbytes, which fails to import: {error}", remedy) from None
    try:
        probe(bitsandbytes)
    except Exception as error:
        raise PipelineError(f"{setting}: bitsandbytes cannot run here: {error}", remedy) from None


def _probe_optimizer(bitsandbytes) -> None:
    """One step of weights that are many enough to be kept in 8 bits, on the device that the draft would train on."""
    import torch

    from pipeline.core.models import default_device

    weights = torch.nn.Parameter(torch.ones(128, 128, device=default_device()))
    weights.grad = torch.ones_like(weights)
    bitsandbytes.optim.AdamW8bit([weights]).step()
    if not torch.isfinite(weights).all():
        raise RuntimeError("the probe gave non-finite values")


def _probe(bitsandbytes, quantization: str) -> None:
    """Run one small quantised layer on the device that the model would use."""
    import torch

    from pipeline.core.models import default_device

    layer_class = bitsandbytes.nn.Linear8bitLt if quantization == "8bit" else bitsandbytes.nn.Linear4bit
    options = {"has_fp16_weights": False} if quantization == "8bit" else {}
    layer = layer_class(64, 64, bias=False, **options).to(default_device())
    output = layer(torch.ones(1, 64, device=default_device()))
    if not torch.isfinite(output).all():
        raise RuntimeError("the probe gave non-finite values")
