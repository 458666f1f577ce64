"""The decoder benchmark runs every step on a tiny model and writes what its readers expect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def run_quick(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/decoder.py", "--quick", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> tuple[dict, str]:
    """The figures and the printed tables of a run."""
    output = tmp_path_factory.mktemp("benchmark") / "decoder.json"
    ended = run_quick("--output", str(output), "--dtypes", "float32", "bfloat16")
    assert ended.returncode == 0, ended.stderr
    return json.loads(output.read_text(encoding="utf-8")), ended.stdout


def test_the_first_data_type_is_measured_in_full_and_the_second_briefly(quick):
    result, printed = quick
    assert set(result) >= {"command", "machine", "model", "settings", "prompt_tokens", "seconds"}
    full, brief = result["dtypes"]
    assert (full["dtype"], full["measured"]) == ("float32", "in full")
    assert (brief["dtype"], brief["measured"]) == ("bfloat16", "briefly")
    assert brief["draft_length"] == full["draft_length"]
    assert set(full["round_ms_by_context"]) == {"40", "400"}
    assert "ours, adaptive k" in full["legs"] and "ours, adaptive k" in full["mixed"]["legs"]
    assert "draft_lengths" not in brief and "prompt_lookup" not in brief
    assert "measured in full" in printed and "measured briefly" in printed


def test_every_leg_decodes_the_same_tokens_in_float32(quick):
    full = quick[0]["dtypes"][0]
    legs = {**full["legs"], **full["prompt_lookup"]}
    names = {"ours, plain", f"ours, k = {full['draft_length']}", "ours, prompt lookup", "ours, lookup then model"}
    assert set(legs) >= names | {"transformers, plain", "transformers, assisted", "transformers, prompt lookup"}
    for leg in legs.values():
        assert leg["same_tokens"] == 1.0 and leg["tokens_per_second"] > 0 and leg["decode_ms_per_token"] > 0
    assert legs["ours, plain"]["tokens_per_round"] == 1.0
    # the same draft, k and tokens: what a round yields is the same too, but for the one that holds the first token
    assisted, ours = (
        legs[name]["tokens_per_round"] for name in ("transformers, assisted", f"ours, k = {full['draft_length']}")
    )
    assert 1.0 < ours and abs(assisted - ours) < 0.5


def test_predictions_stand_beside_measurements_for_every_draft_length(quick):
    result, _ = quick
    full = result["dtypes"][0]
    assert [row["draft_length"] for row in full["draft_lengths"]] == result["settings"]["draft_lengths"]
    for row in [*full["draft_lengths"], full["prediction"]]:
        assert row["speedup_to_predicted"] == pytest.approx(row["speedup"] / row["predicted_speedup"])


def test_every_batch_size_has_its_prediction(quick):
    result, printed = quick
    full = result["dtypes"][0]
    assert [row["batch"] for row in full["batches"]] == result["settings"]["batches"]
    for row in full["batches"]:
        assert row["predicted_speedup"] > 0 and row["speedup"] > 0 and row["plain_tokens_per_second"] > 0
        assert row["best_draft_length"] in result["settings"]["draft_lengths"]
    assert set(full["largest_paying_batch"]) == {"predicted_speedup", "speedup"}
    assert "largest batch at which speculation pays" in printed


def test_ratios_are_judged_and_what_is_missing_is_named(quick):
    result, printed = quick
    for found in result["dtypes"]:
        for row in found["targets"]:
            assert set(row) == {"name", "meaning", "must", "aim", "at_most", "measured", "met"}
            assert (row["met"] is None) == (row["measured"] is None)
        assert found["skipped"]["vLLM, plain"] == "no --vllm-python given"
    assert "skipped: no --vllm-python given" in printed


def test_quick_figures_never_replace_the_results_and_a_python_without_vllm_is_refused(tmp_path):
    ended = run_quick()
    assert ended.returncode == 2 and "--output" in ended.stderr
    ended = run_quick("--output", str(tmp_path / "x.json"), "--vllm-python", str(tmp_path / "python"))
    assert ended.returncode == 2 and "no Python that has vLLM" in ended.stderr
