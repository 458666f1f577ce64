"""8-bit and 4-bit targets through bitsandbytes, refused early where it cannot run."""

from __future__ import annotations

from pipeline.core.errors import PipelineError
from pipeline.core.models import ModelConfig


def quantization_config(config: ModelConfig):
    """The transformers quantisation config for `config.quantization`, or None for full weights.

    Raises `PipelineError`, before any weights load, when bitsandbytes is missing or a probe of it fails.
    """
    if config.quantization == "none":
        return None
    setting = f"target.quantization={config.quantization}"
    remedy = "set target.quantization=none, or use a machine where bitsandbytes runs."
    try:
        import bitsandbytes
    except Exception as error:  # a broken native library raises more than ImportError
        raise PipelineError(f"{setting} needs bitsandbytes, which fails to import: {error}", remedy) from None
    try:
        _probe(bitsandbytes, config.quantization)
    except Exception as error:
        raise PipelineError(f"{setting}: bitsandbytes cannot run here: {error}", remedy) from None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=config.quantization == "8bit", load_in_4bit=config.quantization == "4bit")


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
