"""Which layers of the target make the draft: each number of layers is distilled briefly, measured and predicted."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import PreTrainedModel

from pipeline.adapters.drafts import DraftConfig
from pipeline.adapters.targets import Target
from pipeline.core.artifacts import read_json, write_json
from pipeline.core.cost_measurement import CONTEXT_TOKENS, REPEATS, measure_costs
from pipeline.core.cost_model import Costs, best_draft_length, measured_cost_speedup, tokens_per_round
from pipeline.core.drafters import ModelDrafter
from pipeline.core.models import cast_parameters, default_device, resolve_dtype
from pipeline.core.packing import decoding_view
from pipeline.core.pruning import keep_layers, outer_layers

SCHEMA_NAME, SCHEMA_VERSION = "domain-draft/layer-choice", 1

Train = Callable[[PreTrainedModel, Path], list[dict]]  # (draft, checkpoints) -> history, as `trainer.distill` gives it


def try_layers(
    config: DraftConfig, target: Target, head_token_ids: list[int], train: Train, folder: Path
) -> list[dict[str, Any]]:
    """One row for each number of layers in `config.layer_choice`, in rising order.

    Each row: layers, dev_token_acceptance, the best in `train` (the brief distillation of one draft), cost_ratio,
    draft_length (the k of the best prediction) and predicted_speedup (measured-cost, with the token acceptance as the
    chance of every drafted token). Rows are kept in `folder`, so that a killed run tries and times nothing twice. The
    target is not in memory while a draft is trained, unless `train` loads it. Of several processes the first one measures.
    """
    found = folder / "rows.json"
    depth = target.model_config.get_text_config().num_hidden_layers
    for count in sorted(set(config.layer_choice.layer_counts)):
        layers = outer_layers(count, depth)
        if any(row["layers"] == layers for row in _rows(found)):
            continue
        costs = _costs(config, target, layers, head_token_ids) if PartialState().is_main_process else None
        draft = keep_layers(target.model, layers).float()
        target.unload()
        checkpoints = folder / f"{count}-layers"
        history = train(draft, checkpoints)
        if costs:
            acceptance = max(row["dev_token_acceptance"] for row in history if "dev_token_acceptance" in row)
            row = {"layers": layers, **predicted(acceptance, config.layer_choice.draft_lengths, costs)}
            _report(row)
            write_json(found, SCHEMA_NAME, SCHEMA_VERSION, {"rows": [*_rows(found), row]})
            shutil.rmtree(checkpoints, ignore_errors=True)
        PartialState().wait_for_everyone()
    return _rows(found)


def best_layers(rows: list[dict[str, Any]]) -> list[int]:
    """The layers with the highest predicted speedup; of equals the fewest."""
    return max(rows, key=lambda row: (row["predicted_speedup"], -len(row["layers"])))["layers"]


def predicted(token_acceptance: float, draft_lengths: list[int], costs: Costs) -> dict[str, Any]:
    """What a draft with these figures yields at the best k: the facts of a row besides its layers."""
    by_position = [token_acceptance**position for position in range(1, max(draft_lengths) + 1)]
    k = best_draft_length(by_position, draft_lengths, costs)
    return {
        "dev_token_acceptance": token_acceptance,
        "cost_ratio": costs.cost_ratio,
        "draft_length": k,
        "predicted_speedup": measured_cost_speedup(tokens_per_round(by_position, k), k, costs),
    }


def _costs(config: DraftConfig, target: Target, layers: list[int], head_token_ids: list[int]) -> Costs:
    """Of a draft of these layers, in the dtype that it would be saved in, and of the target as it decodes."""
    draft = cast_parameters(keep_layers(target.model, layers), resolve_dtype(config.dtype, default_device()))
    drafter = ModelDrafter(draft, head_token_ids, config.layer_choice.half_weights)
    lengths = sorted(set(config.layer_choice.draft_lengths))
    return measure_costs(decoding_view(target.model), drafter, lengths, CONTEXT_TOKENS, REPEATS)


def _rows(path: Path) -> list[dict[str, Any]]:
    return read_json(path, SCHEMA_NAME, SCHEMA_VERSION)["rows"] if path.exists() else []


def _report(row: dict[str, Any]) -> None:
    print(
        f"layers {row['layers']}: dev token acceptance {row['dev_token_acceptance']:.3f}, cost ratio"
        f" {row['cost_ratio']:.3f}, predicted speedup {row['predicted_speedup']:.2f} at k = {row['draft_length']}",
        file=sys.stderr,
    )
