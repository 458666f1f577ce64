"""Loading causal language models and tokenizers, and saying exactly which ones they are."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from pipeline.core.artifacts import fingerprint, fingerprint_weights
from pipeline.core.errors import PipelineError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass
class ModelConfig:
    """Which model to load and how."""

    name: str = ""  # short name, used in reports and in the registered model's name
    id: str | None = None  # hub id, local folder, package:<distribution> (a packaged GGUF) or builtin:tiny
    revision: str | None = None  # hub revision (branch, tag or commit)
    dtype: str = "auto"  # auto | bfloat16 | float16 | float32
    quantization: str = "none"  # none | 8bit | 4bit (bitsandbytes)
    trust_remote_code: bool = False  # run code that comes with the model
    device_map: str | None = None  # transformers' device_map ("auto" spreads layers over devices); null: one device

    def __post_init__(self) -> None:
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise PipelineError(f"dtype {self.dtype!r} of {self.id} is unknown.", f"use auto or {', '.join(DTYPES)}.")
        if self.quantization not in ("none", "8bit", "4bit"):
            raise PipelineError(f"quantization {self.quantization!r} is unknown.", "use none, 8bit or 4bit.")


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware computes in it, float32 elsewhere."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


@contextlib.contextmanager
def _named_errors(location: str, what: str):
    """Turn what transformers raises about a model that cannot be found or read into one line with a remedy."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        line = " ".join(str(error).split())[:300]
        raise PipelineError(
            f"The {what} of {location} cannot be loaded: {line}",
            "give the id of a model that the hub has (log in for gated ones) or the path of a folder in transformers format.",
        ) from error


def load_config(location: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    with _named_errors(location, "configuration"):
        return AutoConfig.from_pretrained(location, revision=revision, trust_remote_code=trust_remote_code)


def load_tokenizer(location: str, revision: str | None = None, trust_remote_code: bool = False):
    with _named_errors(location, "tokenizer"):
        return AutoTokenizer.from_pretrained(location, revision=revision, trust_remote_code=trust_remote_code)


def load_generation_config(location: str, revision: str | None = None) -> GenerationConfig:
    """The model's generation config, or one derived from its config where it has none."""
    try:
        return GenerationConfig.from_pretrained(location, revision=revision)
    except OSError:
        return GenerationConfig.from_model_config(load_config(location, revision))


def load_model(
    location: str, config: ModelConfig, quantization_config=None, device: torch.device | None = None
) -> PreTrainedModel:
    """Load weights for inference, in the dtype and on the device that `config` and the machine give, or on `device`."""
    placement = {"device_map": config.device_map} if config.device_map and device is None else {}
    with _named_errors(location, "weights"), quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            location,
            revision=config.revision,
            dtype=resolve_dtype(config.dtype, default_device()),
            trust_remote_code=config.trust_remote_code,
            quantization_config=quantization_config,
            **placement,
        )
    if not placement and quantization_config is None:
        model.to(device or default_device())
    return model.eval()


def max_positions(config: PreTrainedConfig) -> int | None:
    """The longest sequence of a model, in tokens, where its config names one."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def cast_parameters(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Change the type of the weights in place. Buffers keep theirs, as in a model loaded in `dtype`: rotary frequencies
    in half precision would move every logit."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@contextlib.contextmanager
def quiet_transformers():
    """No progress bars and no advice from transformers while the block runs."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()


def eos_token_ids(generation_config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends an answer: the generation config's (one or a list), else the tokenizer's."""
    ids = generation_config.eos_token_id
    ids = tokenizer.eos_token_id if ids is None else ids
    return () if ids is None else tuple(sorted(set(ids if isinstance(ids, list) else [ids])))


def weights_fingerprint(location: str, config: PreTrainedConfig, revision: str | None) -> str:
    """What identifies the weights: the bytes of a local folder's files, or the hub id with its commit."""
    folder = Path(location)
    if folder.is_dir():
        return fingerprint_weights(folder)
    return fingerprint(location, getattr(config, "_commit_hash", None) or revision or "main")


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the token -> id map and of how a probe text is split."""
    probe = "Whereas the Licensee (“you”) agrees:\n\n  §1.2 ½ naïve 東京 🙂\tdef f(x): return x**2 -- 12345"
    return fingerprint(tokenizer.get_vocab(), tokenizer(probe, add_special_tokens=False).input_ids)
