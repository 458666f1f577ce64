"""Which layers of the target make the draft: each number of layers is distilled briefly, measured and predicted."""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import PreTrainedModel

from pipeline.adapters.drafts import DraftConfig
from pipeline.adapters.targets import Target
from pipeline.core.artifacts import read_json, write_json
from pipeline.core.cost_measurement import measure_costs
from pipeline.core.cost_model import Costs, best_draft_length, measured_cost_speedup, tokens_per_round
from pipeline.core.drafters import ModelDrafter
from pipeline.core.models import cast_parameters, default_device, resolve_dtype
from pipeline.core.packing import decoding_view
from pipeline.core.pruning import keep_layers, outer_layers

SCHEMA_NAME, SCHEMA_VERSION = "domain-draft/layer-choice", 1
CONTEXT_TOKENS, REPEATS = 128, 25

Train = Callable[[PreTrainedModel, Path], list[dict]]  # (draft, checkpoints) -> history, as `trainer.distill` gives it


def try_layers(
    config: DraftConfig, target: Target, head_token_ids: list[int], train: Train, folder: Path
) -> list[dict[str, Any]]:
    """One row for each number of layers in `config.layer_choice`, in rising order; see `predictions`.

    `train` distils a draft briefly. What was measured is kept in `folder`, so that a killed run tries nothing twice. The
    target is not in memory while a draft is trained, unless `train` loads it. Of several processes the first one measures.
    """
    found = folder / "trials.json"
    depth = target.model_config.get_text_config().num_hidden_layers
    for count in sorted(set(config.layer_choice.layer_counts)):
        layers = outer_layers(count, depth)
        if any(trial["layers"] == layers for trial in _trials(found)):
            continue
        costs = _costs(config, target, layers, head_token_ids) if PartialState().is_main_process else None
        draft = keep_layers(target.model, layers).float()
        target.unload()
        checkpoints = folder / f"{count}-layers"
        history = train(draft, checkpoints)
        if costs:
            acceptance = max(row["dev_token_acceptance"] for row in history if "dev_token_acceptance" in row)
            trial = {"layers": layers, "dev_token_acceptance": acceptance, "costs": costs.document()}
            write_json(found, SCHEMA_NAME, SCHEMA_VERSION, {"trials": [*_trials(found), trial]})
            shutil.rmtree(checkpoints, ignore_errors=True)
            _say(f"tried layers {layers}: dev token acceptance {acceptance:.3f}, cost ratio {costs.cost_ratio:.3f}")
        PartialState().wait_for_everyone()
    rows = predictions(_trials(found), config.layer_choice.draft_lengths)
    best = best_row(rows)
    _say(
        f"keep layers {best['layers']}: predicted speedup {best['predicted_speedup']:.2f} at k = {best['draft_length']}"
    )
    return rows


def predictions(trials: list[dict[str, Any]], draft_lengths: list[int]) -> list[dict[str, Any]]:
    """What each trial promises at its best k.

    Rows: layers, dev_token_acceptance, cost_ratio, draft_length (that k) and predicted_speedup: measured-cost, with the
    token acceptance as the chance of every drafted token. A step's cost is taken relative to the plain step beside which it
    was timed; what verifying costs is the same for all, so the median over the trials stands for it.
    """
    measured = [Costs.from_document(trial["costs"]) for trial in trials]
    verify = {k: statistics.median(costs.verify_cost(k) for costs in measured) for k in measured[0].target_pass_seconds}
    rows = []
    for trial, own in zip(trials, measured, strict=True):
        acceptance = trial["dev_token_acceptance"]
        costs = Costs(own.cost_ratio, verify)  # in plain steps
        by_position = [acceptance**position for position in range(1, max(draft_lengths) + 1)]
        k = best_draft_length(by_position, draft_lengths, costs)
        speedup = measured_cost_speedup(tokens_per_round(by_position, k), k, costs)
        figures = {"cost_ratio": own.cost_ratio, "draft_length": k, "predicted_speedup": speedup}
        rows.append({"layers": trial["layers"], "dev_token_acceptance": acceptance, **figures})
    return rows


def best_row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row with the highest predicted speedup; of equals the one with the fewest layers."""
    return max(rows, key=lambda row: (row["predicted_speedup"], -len(row["layers"])))


def _costs(config: DraftConfig, target: Target, layers: list[int], head_token_ids: list[int]) -> Costs:
    """Of a draft of these layers, in the dtype that it would be saved in, and of the target as it decodes."""
    draft = cast_parameters(keep_layers(target.model, layers), resolve_dtype(config.dtype, default_device()))
    drafter = ModelDrafter(draft, head_token_ids, config.layer_choice.half_weights)
    lengths = sorted(set(config.layer_choice.draft_lengths))
    return measure_costs(decoding_view(target.model), drafter, lengths, CONTEXT_TOKENS, REPEATS)


def _trials(path: Path) -> list[dict[str, Any]]:
    return read_json(path, SCHEMA_NAME, SCHEMA_VERSION)["trials"] if path.exists() else []


def _say(line: str) -> None:
    if PartialState().is_main_process:
        print(line, file=sys.stderr)
