"""The target as its own draft: it guesses everything and gains nothing, which the default gate has to see."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from hydra import compose, initialize_config_dir
from test_comparison import CONFIG, answers, contestants
from tiny_models import tiny_llama

from pipeline import gate, stage
from pipeline.core import evaluation
from pipeline.core.comparison import evaluate
from pipeline.core.evaluation_settings import DecodeSettings
from pipeline.core.gating import judge

ACCEPTANCES = ("token_acceptance_trimmed_head", "token_acceptance_without_loops", "acceptance_rate")


def test_the_target_as_its_own_draft_is_accepted_always_and_fails_the_gate(monkeypatch):
    """Acceptance is measured. So that no clock decides, a request takes a second for each pass of either model, which are
    equally large: a round of k drafted tokens k + 1."""
    decode_lot = evaluation.time_lot

    def timed(decoder, answers, seed):
        runs = decode_lot(decoder, answers, seed)
        passes = [sum(1 + block.drafted for block in run.sequence.rounds) for run in runs]
        return [dataclasses.replace(run, seconds=float(n)) for run, n in zip(runs, passes, strict=True)]

    monkeypatch.setattr(evaluation, "time_lot", timed)
    target = tiny_llama(std=0.3)
    golden = answers(target, 5, "legal")
    models = contestants(target, copy.deepcopy(target))
    metrics = evaluate(models, golden[:3], golden, DecodeSettings(draft_length=2), CONFIG, seed=0).metrics
    with initialize_config_dir(stage.CONF_DIR, version_base="1.3"):
        rules = stage.typed_config(compose("config"), gate.Config).gate.checks
    verdict = judge(metrics, rules)
    checks = {check["metric"]: check for check in verdict["checks"]}
    assert {name: (checks[name]["value"], checks[name]["state"]) for name in ACCEPTANCES} == dict.fromkeys(
        ACCEPTANCES, (1.0, "passed")
    )
    speedup = checks["speedup"]
    plain, own = 11, 4 * 3  # passes after the prefill: 3 + 3 + 3 + 2 tokens in four rounds of two drafted ones
    assert speedup["state"] == "failed" and speedup["value"] == pytest.approx(plain / own)
    assert checks["draft_share"]["state"] == "failed" and checks["draft_share"]["value"] == 0.5
    assert checks["lossless"]["value"] == 1.0 and not verdict["passed"]
