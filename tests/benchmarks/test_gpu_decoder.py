"""The GPU benchmark runs on a tiny model, on a machine without the pipeline's heavy dependencies, and refuses clearly."""

from __future__ import annotations

import pytest
import torch
from script import load, run_tiny

gpu_decoder = load("gpu_decoder")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run_tiny("gpu_decoder.py", tmp_path_factory.mktemp("gpu"))


def test_every_figure_is_there(result):
    found, text = result
    work = gpu_decoder.TINY
    assert found["machine"]["torch"] == torch.__version__
    assert found["argmax_agreement"] == 1.0 and found["copy_bytes_per_second"] > 0
    sweep = found["draft_lengths"]
    assert sweep["plain"]["acceptance_rate"] is None and sweep["plain"]["tokens_per_round"] == 1.0
    for draft in ("distilled", "grown"):
        assert [row["k"] for row in sweep["drafts"][draft]["lengths"]] == list(work.draft_lengths)
    assert [row["batch_size"] for row in found["batch_sizes"]["rows"]] == list(work.batch_sizes)
    assert len(found["goals"]) == 4 and all(goal["met"] in (True, False) for goal in found["goals"])
    assert text.count("needs >=") == 4 and "elapsed" not in text


def test_scripted_acceptance_is_what_was_asked_for(result):
    curve = result[0]["acceptance_curve"]
    assert [row["token_acceptance"] for row in curve] == list(gpu_decoder.TINY.acceptances)
    rates = [row["acceptance_rate"] for row in curve]
    assert rates == sorted(rates) and rates[0] < 0.6 and rates[-1] == 1.0


def test_both_drafts_guess_alike(result):
    """Growing preserves what a draft says, so it is accepted as often."""
    distilled, grown = (result[0]["draft_lengths"]["drafts"][name]["lengths"] for name in ("distilled", "grown"))
    assert [row["acceptance_rate"] for row in distilled] == [row["acceptance_rate"] for row in grown]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--device cpu --tiny"),
        (["--device", "cpu"], "add --tiny"),
    ],
)
def test_without_a_gpu_it_refuses(options, words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_decoder.main(options) == 1
    assert words in capsys.readouterr().err


def test_a_missing_bundle_is_named(tmp_path):
    with pytest.raises(gpu_decoder.PipelineError, match="gpu_bundle.py"):
        gpu_decoder.load_bundle(tmp_path)


def test_overlapping_device_intervals_count_once():
    assert gpu_decoder.covered([(5, 7), (0, 2), (1, 3), (5.5, 6)]) == 5


def test_speedup_is_interpolated_at_a_rate():
    curve = [{"k": 4, "acceptance_rate": rate, "speedup": 4 * rate} for rate in (0.9, 0.5)]
    curve.append({"k": 2, "acceptance_rate": 0.65, "speedup": 9.0})
    assert gpu_decoder.speedup_at_rate(curve, 4, 0.65) == pytest.approx(2.6)
    assert gpu_decoder.speedup_at_rate(curve, 4, 0.95) is None


def test_passes_stop_when_the_time_is_spent():
    models = gpu_decoder.Models(None, gpu_decoder.build_tiny()[0], {}, [], [])
    decoder = models.decoder(None, gpu_decoder.TINY)
    calls = []

    def run(batch):
        calls.append(batch)
        return gpu_decoder.run_once(decoder, batch)

    timings = gpu_decoder.interleaved({"plain": run}, [[[5, 6, 7]]], repeats=3, deadline=0.0)
    assert len(calls) == 1 and timings["plain"].tokens == gpu_decoder.TINY.new_tokens
