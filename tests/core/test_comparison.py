"""The evaluation as a whole on tiny models: greedy, sampled and in half precision (S09, D12)."""

from __future__ import annotations

import collections
import copy
import dataclasses
import json

import numpy as np
import pytest
import torch
from tiny_models import noisy_copy, tiny_llama, uncached_greedy
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from pipeline.core import comparison, conditions, evaluation
from pipeline.core.answers import Answer
from pipeline.core.comparison import _warnings, evaluate, served_gap, summarise
from pipeline.core.conditions import expected_acceptances, suited_lengths, versus_champion
from pipeline.core.cost_model import Costs
from pipeline.core.decoding import DecodeConfig
from pipeline.core.drafters import ModelDrafter
from pipeline.core.errors import PipelineError
from pipeline.core.evaluation import Agreement, near_tie_gap, stored_logits, teacher_forced
from pipeline.core.evaluation_settings import Contestants, DecodeSettings, Draft, EvaluateConfig, Sibling
from pipeline.core.sampling import Sampling

CONFIG = EvaluateConfig(
    siblings=[],
    repeats=1, sweep_prompts=0, batch_sizes=[2], batch_prompts=4, temperatures=[0.7], temperature_prompts=2, condition_prompts_other=0, baselines_everywhere=False,
    max_new_tokens=12, timed_prompts=3, timed_prompts_other=1, baseline_prompts=2, reference_prompts=1, dev_prompts=2,
    draft_lengths=[1, 2], lookup_ngram=2, lossless_prompts=2, lossless_new_tokens=8, near_tie_gap=0.5,
    bootstrap_samples=100, tokens_per_forward=200,
)  # fmt: skip


def answers(target, count: int, domain: str) -> list[Answer]:
    rows = []
    for index in range(count):
        prompt = [index + 1, 2 * index + 3, 5]
        ids = uncached_greedy(target, prompt, 10)
        with torch.inference_mode():
            logprobs = target(torch.tensor([prompt + ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
        values, top = (tensor.numpy() for tensor in logprobs.topk(6))
        top = top.astype(np.int32)
        rows.append(
            Answer(
                f"{domain}{index}", domain, "continuation", str(index), np.array(prompt, np.int32),
                np.array(ids, np.int32), "length", Sampling(), 0, values[2:, 0], top[2:], values[2:], top[:2], values[:2],
            )
        )  # fmt: skip
    return rows


@pytest.fixture(scope="module")
def pair():
    target = tiny_llama(std=0.3)
    return target, noisy_copy(target, 0.02)


def contestants(target, draft) -> Contestants:
    drafts = {"undistilled": tiny_llama(seed=5), "distilled": draft}
    taking_part = {name: Draft(model, list(range(100))) for name, model in drafts.items()}
    return Contestants(target, taking_part, False, range(100), "legal", {"champion": "no draft was promoted yet"})


def test_greedy_evaluation_measures_every_candidate(pair):
    target, draft = pair
    golden = answers(target, 5, "legal") + answers(target, 2, "code")
    outcome = evaluate(contestants(target, draft), golden[:3], golden, DecodeSettings(), CONFIG, seed=0)
    metrics = outcome.metrics
    json.dumps(metrics, allow_nan=False)
    legal = metrics["candidates"]["distilled"]["legal"]
    assert legal["speedup"]["count"] == 3 and legal["token_acceptance_trimmed_head"]["count"] == 5
    assert metrics["candidates"]["prompt_lookup"]["legal"]["speedup"]["count"] == 2
    assert metrics["candidates"]["undistilled"]["code"].get("speedup") is None
    assert metrics["lossless"] == {"value": 1.0, "interval": None, "count": 8, "reason": None, "departures": []}
    assert metrics["settings"]["draft_length"] in (1, 2) and metrics["settings"]["draft_length_chosen_on"] == "dev"
    for name, by_domain in metrics["candidates"].items():
        assert set(by_domain["legal"]["predicted_speedup"]) == {"measured-cost", "classic", "simple"}
        assert by_domain["legal"]["predicted_speedup"]["measured-cost"] > 0 and metrics["cost_ratios"][name] >= 0
    assert metrics["cost_ratios"]["prompt_lookup"] == 0 < metrics["cost_ratios"]["undistilled"]
    assert metrics["reference"]["transformers_plain_tokens_per_second"] > 0
    assert metrics["skipped"] == {"champion": "no draft was promoted yet"} and metrics["versus_champion"] is None
    assert metrics["dev"]["token_acceptance_trimmed_head"]["count"] == 3
    assert set(metrics["by_task"]["distilled"]) == {"legal, continuation", "code, continuation", "all"}
    assert metrics["by_prompt_length"]["distilled"]["under 1k"]["speedup"]["count"] == 4
    summary = summarise({"target": {"name": "tiny"}, **metrics})
    assert (summary["target"], summary["domain"]) == ("tiny", "legal")
    assert summary["token_acceptance_trimmed_head_legal"] == legal["token_acceptance_trimmed_head"]["value"]
    configured = evaluate(contestants(target, draft), [], golden, DecodeSettings(draft_length=3), CONFIG, seed=0)
    assert configured.metrics["settings"]["draft_length"] == 3
    assert max(max(request.drafted) for request in configured.requests) == 3


def test_other_conditions_are_rows_of_their_own(pair):
    target, draft = pair
    golden = answers(target, 5, "legal")
    config = dataclasses.replace(CONFIG, sweep_prompts=1, batch_sizes=[2, 4, 8], temperatures=[0.0, 0.7], repeats=2)
    outcome = evaluate(contestants(target, draft), golden[:3], golden, DecodeSettings(), config, seed=0)
    metrics = outcome.metrics
    decoded = collections.Counter(
        (r.condition, r.candidate, r.batch, r.temperature) for r in outcome.requests if r.condition != "headline"
    )
    own, plain = ({key: n for key, n in decoded.items() if key[1] == name} for name in ("distilled", "plain"))
    assert own == {
        ("draft_length", "distilled", 1, 0.0): 2, ("batch", "distilled", 2, 0.0): 4, ("batch", "distilled", 4, 0.0): 4,
        ("temperature", "distilled", 1, 0.7): 2, ("dev", "distilled", 1, 0.0): 2,
    }  # fmt: skip
    own.pop(("dev", "distilled", 1, 0.0))
    assert sorted(plain.values()) == sorted(own.values()) and len(decoded) == len(own) + len(plain) + 1, (
        "with plain runs"
    )
    swept = [r for r in outcome.requests if (r.condition, r.candidate) == ("draft_length", "distilled")]
    assert [r.draft_length for r in swept] == [1, 2] and max(swept[0].drafted) == 1
    assert {r.draft_length for r in outcome.requests if r.candidate == "plain"} == {0}
    documents = {answer.prompt_id: answer.cluster for answer in golden}
    assert all(r.cluster == documents[r.prompt_id] for r in outcome.requests), "documents, not lots"
    two, four, eight = metrics["by_batch"]
    assert (two["batch"], two["speedup"]["count"], four["speedup"]["count"]) == (2, 4, 4)
    assert two["speedup"]["interval"] is None, "two lots are too few for one"
    for name in ("ttft_seconds", "itl_p95_seconds", "smoothness", "latency_seconds", "acceptance_by_position"):
        assert np.all(np.array(two[name]["value"]) > 0), name
    assert two["ttft_seconds"]["value"] < two["latency_seconds"]["value"]
    rate = two["tokens_per_second"]["value"] * two["latency_seconds"]["value"] / CONFIG.max_new_tokens
    assert 0.999 <= rate <= 2.001, "of two requests together, each lasts at most as long as the lot"
    assert 0 < two["target_passes_saved"]["value"] < 1
    assert all(value > 0 for value in two["predicted_speedup"].values()) and two["costs"]["cost_ratio"] > 0
    rounds = [r for r in outcome.requests if (r.condition, r.candidate, r.batch) == ("batch", "distilled", 2)]
    counted = sum(sum(r.accepted) for r in rounds) / sum(sum(r.drafted) for r in rounds)
    assert two["acceptance_rate"]["value"] == pytest.approx(counted), "the raw counts give the row's figure"
    lots = {(r.candidate, r.lot): r for r in outcome.requests if (r.condition, r.batch) == ("batch", 2)}
    passes = [sum(lots[name, lot].target_passes for lot in (0, 1)) for name in ("distilled", "plain")]
    assert two["target_passes_saved"]["value"] == pytest.approx(1 - passes[0] / passes[1])
    longest = collections.defaultdict(float)
    for r in outcome.requests:
        if (r.condition, r.batch) == ("batch", 2):
            longest[r.candidate, r.lot] = max(longest[r.candidate, r.lot], r.seconds)
    seconds = [sum(longest[name, lot] for lot in (0, 1)) for name in ("plain", "distilled")]
    assert two["speedup"]["value"] == pytest.approx(seconds[0] / seconds[1])
    assert two["others"] == {}
    assert two["draft_length"] in (1, 2) and 0 < two["acceptance_rate"]["value"] <= 1
    assert eight["speedup"]["value"] is None
    assert eight["speedup"]["reason"] == "4 prompts make no lot of 8: raise evaluate.batch_prompts"
    (warm,) = metrics["by_temperature"]
    assert warm["temperature"] == 0.7 and warm["speedup"]["count"] == 2
    exact, best, least = (
        warm[f"token_acceptance_{name}"]["value"] for name in ("full_head", "greedy_draft", "exact_match")
    )
    assert 0 < least < exact < 1 and 0 < best < 1
    rows = metrics["by_draft_length"]
    assert [row["draft_length"] for row in rows] == [1, 2] and all(row["speedup"]["count"] == 1 for row in rows)
    memory = metrics["memory"]
    assert memory["target_weight_bytes"] == sum(p.numel() * 4 for p in target.parameters())
    own, lookup = memory["candidates"]["distilled"], memory["candidates"]["prompt_lookup"]
    assert own["weight_bytes"] == sum(p.numel() * 4 for p in draft.parameters())
    assert 0 < own["draft_share"] < 1 and memory["peak_bytes"] > memory["target_weight_bytes"]
    saved = metrics["candidates"]["distilled"]["legal"]["target_passes_saved"]["value"]
    assert own["memory_efficiency"]["value"] == pytest.approx(
        saved / (own["weight_bytes"] + own["cache_bytes"]) * 2**30
    )
    assert lookup["draft_share"] == 0 and lookup["memory_efficiency"]["reason"] == "it takes no memory"


def test_every_candidate_drafts_at_the_length_that_suits_it(pair, monkeypatch):
    """The champion at the one that it is served with; acceptance rates at different lengths are not compared."""
    target, draft = pair

    def measured(target, drafter, lengths, *_, **__):
        return Costs(0.3, {k: 1 + 0.1 * k for k in (0, *lengths)})

    for module in (comparison, conditions):
        monkeypatch.setattr(module, "measure_costs", measured)
    golden = answers(target, 5, "legal")
    models = contestants(target, draft)
    models.drafts["champion"] = Draft(noisy_copy(target, 0.05), list(range(100)), draft_length=4)
    config = dataclasses.replace(CONFIG, draft_lengths=[2, 3])
    outcome = evaluate(models, golden[:3], golden, DecodeSettings(), config, seed=0)
    lengths, own = outcome.metrics["draft_lengths"], outcome.metrics["settings"]["draft_length"]
    assert lengths["distilled"] == own and lengths["champion"] == 4
    assert lengths["undistilled"] == 2, "a draft that guesses nothing drafts as little as it may"
    headline = [r for r in outcome.requests if r.condition == "headline"]
    longest = {name: max(max(r.drafted) for r in headline if r.candidate == name) for name in lengths}
    assert longest["champion"] == 4 and longest["undistilled"] == 2 and longest["distilled"] == own
    assert outcome.metrics["candidates"]["champion"]["legal"]["acceptance_rate"]["draft_length"] == 4
    versus = outcome.metrics["versus_champion"]["legal"]
    assert versus["acceptance_rate_difference"]["reason"] == "they draft at different k"
    assert versus["speedup_ratio"]["value"] > 0
    configured = evaluate(models, golden[:3], golden, DecodeSettings(draft_length=1), CONFIG, seed=0).metrics
    assert configured["draft_lengths"] == {"prompt_lookup": 1, "undistilled": 1, "distilled": 1, "champion": 4}


def test_lookup_drafts_long_where_the_text_repeats_itself(pair):
    """Its copies cost no pass of a model, so that only the target's longer passes speak against a long one."""
    target, draft = pair
    repeating = [
        dataclasses.replace(answer, answer_ids=np.array(([7, 8, 9] * 4)[:10], np.int32))
        for answer in answers(target, 2, "legal")
    ]
    models, config = contestants(target, draft), dataclasses.replace(CONFIG, draft_lengths=[1, 5])
    costs = Costs(0.9, {0: 1.0, 1: 1.0, 5: 1.1})
    settings = DecodeConfig(draft_length=5, max_new_tokens=12, allowed_token_ids=range(100))
    expected = expected_acceptances(models, repeating, [0.4, 0.1], settings, config)
    costs_of = {"prompt_lookup": dataclasses.replace(costs, draft_step_seconds=0.0), "distilled": costs}
    found = suited_lengths(models, expected, costs_of, DecodeSettings(), config)
    assert found == {"prompt_lookup": 5, "distilled": 1}
    nothing = suited_lengths(models, {}, costs_of, DecodeSettings(), config)
    assert nothing == {"prompt_lookup": 1, "distilled": 1}, "where nothing is expected, the cheapest round"


def test_all_candidates_are_measured_everywhere_where_that_is_asked_for(pair):
    """A sibling off the shelf, prompt lookup and the rest beside the distilled draft: by batch size, temperature and k."""
    target, draft = pair
    golden = answers(target, 5, "legal") + answers(target, 2, "code")
    models = contestants(target, draft)
    models.drafts["small sibling"] = Draft(noisy_copy(target, 0.05), list(range(100)))
    config = dataclasses.replace(CONFIG, baselines_everywhere=True, sweep_prompts=1)
    metrics = evaluate(models, golden[:3], golden, DecodeSettings(), config, seed=0).metrics
    others = ["prompt_lookup", "small sibling", "undistilled"]
    (two,), (warm,), (one, _) = metrics["by_batch"], metrics["by_temperature"], metrics["by_draft_length"]
    for row in (two, warm, one):
        assert sorted(row["others"]) == others
        for name, own in row["others"].items():
            assert own["speedup"]["value"] > 0 and own["draft_length"] >= 1, name
    assert two["others"]["small sibling"]["costs"]["cost_ratio"] > 0
    assert warm["others"]["small sibling"]["token_acceptance_trimmed_head"]["value"] > 0
    for name in others:
        assert metrics["candidates"][name]["code"]["speedup"]["count"] == 1, "in other domains too"
    own = metrics["candidates"]["small sibling"]["legal"]
    assert own["acceptance_rate"]["draft_length"] == metrics["draft_lengths"]["small sibling"]
    assert own["speedup"]["count"] == 2 and metrics["cost_ratios"]["small sibling"] > 0
    assert metrics["memory"]["candidates"]["small sibling"]["weight_bytes"] > 0
    by_task = metrics["by_task"]["distilled"]["legal, continuation"]
    assert by_task["predicted_speedup"]["measured-cost"] > 0


def test_other_domains_are_measured_under_all_conditions_where_that_is_asked_for(pair, monkeypatch):
    """With costs by batch size that are measured once for all of them; their k by batch is that of the target domain."""
    target, draft = pair
    golden, real, sizes = answers(target, 4, "legal") + answers(target, 3, "code"), conditions.measure_costs, []

    def counting(*arguments):
        sizes.append(arguments[5])
        return real(*arguments)

    monkeypatch.setattr(conditions, "measure_costs", counting)
    config = dataclasses.replace(CONFIG, condition_prompts_other=2, sweep_prompts=1)
    dev = [*golden[:2], *golden[4:6]]
    outcome = evaluate(contestants(target, draft), dev, golden, DecodeSettings(), config, seed=0)
    metrics = outcome.metrics
    json.dumps(metrics, allow_nan=False)
    (code,) = metrics["other_domains"].values()
    assert list(metrics["other_domains"]) == ["code"] and sizes.count(2) == 1
    (two,), (warm,), swept = code["by_batch"], code["by_temperature"], code["by_draft_length"]
    assert (two["speedup"]["count"], warm["speedup"]["count"]) == (2, 2)
    assert two["draft_length"] == metrics["by_batch"][0]["draft_length"]
    assert two["costs"] == metrics["by_batch"][0]["costs"] and two["predicted_speedup"]["classic"] > 0
    assert [row["draft_length"] for row in swept] == [1, 2] and swept[0]["speedup"]["count"] == 2
    assert all(0 < row["expected_acceptance_rate"] <= 1 for row in swept)
    found = {(r.condition, r.domain) for r in outcome.requests}
    assert {("batch", "code"), ("temperature", "code"), ("draft_length", "code")} < found
    other = dataclasses.replace(config, batch_sizes=[3], sweep_prompts=0, temperature_prompts=0)
    longer = DecodeSettings(draft_length=4)
    found = evaluate(contestants(target, draft), dev, golden, longer, other, seed=0).metrics["other_domains"]["code"]
    (row,), (*_, longest) = found["by_batch"], found["by_draft_length"]
    assert row["speedup"]["reason"] == "2 prompts make no lot of 3: raise evaluate.condition_prompts_other"
    assert found["by_temperature"] == [] and longest["speedup"]["reason"] == "not timed", "as on the target domain"
    scored = conditions.agreed_by_position(
        contestants(target, draft), "distilled", dev[2:], DecodeConfig(draft_length=4, max_new_tokens=1), other
    )
    assert longest["draft_length"] == 4 and len(scored) == 4
    assert longest["expected_acceptance_rate"] == pytest.approx(np.mean(scored)), "all four positions"


@pytest.mark.parametrize("place", ["costs", "lots"])
def test_what_does_not_fit_into_memory_costs_its_row_alone(pair, monkeypatch, place):
    target, draft = pair
    golden = answers(target, 5, "legal")
    real = conditions.measure_costs

    def unless_four(rows: int, measured, *arguments):
        if rows == 4:
            raise torch.OutOfMemoryError("out of memory")
        return measured(*arguments)

    config = dataclasses.replace(CONFIG, batch_sizes=[2, 4])
    if place == "costs":
        monkeypatch.setattr(conditions, "measure_costs", lambda *given: unless_four(given[5], real, *given))
    else:
        lots = conditions.Conditions._lots_timed
        monkeypatch.setattr(
            conditions.Conditions,
            "_lots_timed",
            lambda own, found, k: unless_four(len(found[0]), lots, own, found, k),
        )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    two, four = evaluate(contestants(target, draft), golden[:3], golden, DecodeSettings(), config, seed=0).metrics[
        "by_batch"
    ]
    assert two["speedup"]["value"] > 0
    assert four["speedup"]["reason"] == "4 requests together do not fit into memory" and four["draft_length"] is None


def test_where_all_candidates_do_not_fit_the_draft_is_measured_alone(pair, monkeypatch):
    target, draft = pair
    golden = answers(target, 5, "legal")
    real = conditions.Conditions._under_load

    def tight(own, lots, size, agreed, names):
        if len(names) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return real(own, lots, size, agreed, names)

    monkeypatch.setattr(conditions.Conditions, "_under_load", tight)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    config = dataclasses.replace(CONFIG, baselines_everywhere=True)
    (two,) = evaluate(contestants(target, draft), golden[:3], golden, DecodeSettings(), config, seed=0).metrics[
        "by_batch"
    ]
    assert two["speedup"]["value"] > 0 and set(two["others"]) == {"prompt_lookup", "undistilled"}
    for own in two["others"].values():
        assert own["speedup"]["reason"] == "2 requests together do not fit into memory with all candidates"
        assert own["draft_length"] is None and own["costs"] is None

    def full(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(conditions.Conditions, "_under_load", full)
    (two,) = evaluate(contestants(target, draft), golden[:3], golden, DecodeSettings(), config, seed=0).metrics[
        "by_batch"
    ]
    assert two["speedup"]["reason"] == "2 requests together do not fit into memory" and len(two["others"]) == 2


def test_what_was_not_decoded_has_its_reason(pair):
    """Neither lookup, which takes no memory, nor the undistilled draft decodes anything."""
    target, draft = pair
    golden = answers(target, 4, "legal")
    config = dataclasses.replace(CONFIG, baseline_prompts=0, batch_sizes=[])
    metrics = evaluate(contestants(target, draft), [], golden, DecodeSettings(), config, seed=0).metrics
    assert metrics["settings"]["draft_length_chosen_on"] == "costs" and metrics["by_draft_length"] == []
    efficiency = {name: own["memory_efficiency"] for name, own in metrics["memory"]["candidates"].items()}
    assert efficiency["prompt_lookup"]["reason"] == "it takes no memory"
    assert efficiency["undistilled"]["reason"] == "not measured in this domain" and efficiency["distilled"]["value"] > 0


def test_a_draft_with_a_shorter_context_is_compared_on_the_answers_that_both_saw():
    rows = [Agreement(f"p{i}", "legal", "t", f"c{i}", 3, False, 10, 5.0 + i, None, None, None, []) for i in range(4)]
    theirs = [dataclasses.replace(row, trimmed_head=row.trimmed_head - 1) for row in rows]
    found = versus_champion([], {"distilled": rows[:3], "champion": theirs}, {"distilled": 1, "champion": 1}, 20)
    difference = found["legal"]["token_acceptance_difference"]
    assert difference["value"] == pytest.approx(0.1) and difference["count"] == 3


@pytest.mark.parametrize("quantization", ["load_in_4bit", "load_in_8bit"])
def test_a_quantised_target_is_compared_with_what_its_weights_stand_for(pair, tmp_path, quantization):
    target, draft = pair
    target.save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(**{quantization: True})
    small = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings, device_map="cpu").eval()
    golden = answers(small, 3, "legal")
    metrics = evaluate(
        contestants(small, draft), golden[:2], golden, DecodeSettings(draft_length=2), CONFIG, seed=0
    ).metrics
    assert metrics["lossless"]["departures"] == [] and metrics["lossless"]["count"] == 2
    assert all(departure["legal"] for departure in metrics["lossless"]["half_precision_departures"])
    assert metrics["lossless"]["value"] == 1.0


def test_a_sibling_with_too_short_a_context_is_skipped_and_the_draft_itself_refused(pair):
    target, draft = pair
    golden = answers(target, 3, "legal")
    models = contestants(target, draft)
    models.drafts["short"] = Draft(tiny_llama(seed=7, max_position_embeddings=12), list(range(100)))
    metrics = evaluate(models, golden, golden, DecodeSettings(draft_length=1), CONFIG, seed=0).metrics
    assert metrics["skipped"]["short"] == "it has 12 positions, prompts and answers take up to 15"
    assert "short" not in metrics["candidates"]
    models.drafts["distilled"] = models.drafts.pop("short")
    with pytest.raises(PipelineError, match="12 positions of the distilled model"):
        evaluate(models, golden, golden, DecodeSettings(draft_length=1), CONFIG, seed=0)


def test_a_prompt_counts_with_its_run_of_median_time(pair, monkeypatch):
    """Of three runs of each, the second longest; the first decoder changes from turn to turn."""
    target, draft = pair
    golden = answers(target, 2, "legal")
    order, real = [], evaluation.time_lot

    def timed(decoder, prompts, seed):
        (run,) = real(decoder, prompts, seed)
        order.append(decoder)
        return [dataclasses.replace(run, seconds=float(len(order)))]

    monkeypatch.setattr(evaluation, "time_lot", timed)
    engine = evaluation.Engine(target, DecodeConfig(draft_length=1, max_new_tokens=4, allowed_token_ids=range(100)))
    engine.add("plain", None)
    engine.add("draft", draft)
    requests, _ = evaluation.time_candidates(engine, golden, lambda _: ["draft"], 0, "", repeats=3)
    plain, ours = engine.decoders["plain"], engine.decoders["draft"]
    assert order == [plain, ours, *[plain, ours, ours, plain, plain, ours], *[ours, plain, plain, ours, ours, plain]]
    assert [(r.plain_seconds, r.seconds) for r in requests] == [(6.0, 5.0), (11.0, 12.0)]


def test_the_champion_is_compared_prompt_by_prompt(pair):
    target, draft = pair
    golden = answers(target, 4, "legal") + answers(target, 2, "code")
    models = contestants(target, draft)
    models.drafts["champion"] = Draft(noisy_copy(target, 0.1), list(range(100)))
    outcome = evaluate(models, golden[:3], golden, DecodeSettings(draft_length=2), CONFIG, seed=0)
    metrics = outcome.metrics
    ours, theirs = (metrics["candidates"][name]["legal"] for name in ("distilled", "champion"))
    versus = metrics["versus_champion"]["legal"]
    name = "token_acceptance_trimmed_head"
    assert versus["token_acceptance_difference"]["value"] == pytest.approx(ours[name]["value"] - theirs[name]["value"])
    assert versus["token_acceptance_difference"]["value"] > 0 and versus["token_acceptance_difference"]["count"] == 4
    rates = [found["acceptance_rate"]["value"] for found in (ours, theirs)]
    assert versus["acceptance_rate_difference"]["value"] == pytest.approx(rates[0] - rates[1])
    seconds = {
        c: sum(r.seconds for r in outcome.requests if (r.candidate, r.condition, r.domain) == (c, "headline", "legal"))
        for c in ("distilled", "champion")
    }
    assert versus["speedup_ratio"]["value"] == pytest.approx(seconds["champion"] / seconds["distilled"])
    assert set(metrics["versus_champion"]) == {"legal", "code", "all"}


@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 0.8), (torch.bfloat16, 0.0)])
def test_sampled_and_half_precision_runs_prove_losslessness_in_float32(pair, dtype, temperature):
    target, draft = (copy.deepcopy(model).to(dtype) for model in pair)
    golden = answers(pair[0], 3, "legal")
    settings = DecodeSettings(temperature=temperature, draft_length=2)
    metrics = evaluate(contestants(target, draft), golden, golden, settings, CONFIG, seed=0).metrics
    assert metrics["lossless"]["count"] == 2 and metrics["lossless"]["departures"] == []
    for departure in metrics["lossless"].get("half_precision_departures", []):
        assert set(departure) == {"prompt_id", "candidate", "token_index", "float32_gap", "legal"}


def test_the_gap_of_a_departure_is_the_farther_tokens_distance_from_the_best():
    target = tiny_llama()
    with torch.inference_mode():
        logits = target(torch.tensor([[1, 2, 3]]), use_cache=False).logits[0, -1]
    first, second, third = logits.topk(3).indices.tolist()
    gap = near_tie_gap(target, [1, 2, 3], (second, first))
    assert gap == pytest.approx((logits[first] - logits[second]).item(), abs=1e-5)
    farther = pytest.approx((logits[first] - logits[third]).item(), abs=1e-5)
    assert (
        near_tie_gap(target, [1, 2, 3], (first, third)) == near_tie_gap(target, [1, 2, 3], (second, third)) == farther
    )


def test_stored_probabilities_and_an_even_rest_are_a_distribution():
    whole = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    top, ids = whole.topk(8)
    found = stored_logits({"top_logprobs": top, "top_ids": ids}, 40).exp()
    assert torch.allclose(found.sum(-1), torch.ones(5), atol=1e-5)
    assert torch.allclose(found.gather(-1, ids), top.exp())
    rest = (1 - top.exp().sum(-1)) / 32
    assert torch.allclose(found.scatter(-1, ids, 0).amax(-1), rest) and found.min() > 0


def test_token_acceptance_is_exact_for_greedy_and_sampled(pair):
    target, draft = pair
    rows = answers(target, 4, "legal")
    head = list(range(0, 100, 2))
    greedy = teacher_forced(ModelDrafter(draft, head), None, rows, range(100), Sampling(), 64)
    sampled = teacher_forced(ModelDrafter(draft, head), target, rows, range(100), Sampling(temperature=0.7), 64)
    by_id = {row.prompt_id: row for row in rows}
    for found, soft in zip(greedy, sampled, strict=True):
        row = by_id[found.prompt_id]
        ids = torch.tensor([row.prompt_ids.tolist() + row.answer_ids.tolist()])
        with torch.inference_mode():
            p, q = (model(ids, use_cache=False).logits[0, 2:-1] for model in (target, draft))
        full = (p.argmax(-1) == q.argmax(-1)).sum().item()
        trimmed = (p.argmax(-1) == torch.tensor(head)[q[:, head].argmax(-1)]).sum().item()
        assert (found.full_head, found.trimmed_head) == (full, trimmed)
        p, q_full, q_head = ((x / 0.7).softmax(-1) for x in (p, q, q[:, head]))
        assert soft.full_head == pytest.approx(torch.minimum(p, q_full).sum().item(), abs=1e-4)
        assert soft.trimmed_head == pytest.approx(torch.minimum(p[:, head], q_head).sum().item(), abs=1e-4)
        best = p.gather(-1, q_full.argmax(-1, keepdim=True)).sum().item()
        assert soft.full_head_best == pytest.approx(best, abs=1e-4)
        assert soft.full_head_same == pytest.approx((p * q_full).sum().item(), abs=1e-4)


def test_a_gap_between_teacher_forced_and_served_acceptance_is_a_warning():
    """S09"""

    agreed = [Agreement("p", "legal", "t", "c", 3, False, 5, 2.0, None, None, None, [1.0, 1.0, 0.0, 1.0, 0.0])]

    def gap(served):
        return served_gap({"legal": {"acceptance_by_position": {"value": [served, 0.2]}}}, "legal", agreed, 2, 5)

    near, far = gap(0.45), gap(0.30)  # rounds begin at positions 1 (accepted) and 3 (accepted): all of two
    assert far == {"predicted_first_drafted_token": 1.0, "first_drafted_token": 0.3, "gap": pytest.approx(-0.7)}

    def warnings(found):
        return _warnings(found, "legal", {}, {})

    assert warnings(gap(0.95)) == [] and "0.30" in warnings(far)[0] and warnings(near)
    nothing = served_gap({}, "legal", [], 2, 5)
    assert nothing["gap"] is None and warnings(nothing) == []
    dev, golden = ({"token_acceptance_trimmed_head": {"value": value}} for value in (0.62, 0.45))
    assert "0.62 on dev and 0.45 on golden" in _warnings(nothing, "legal", dev, golden)[0]


def test_lengths_that_cannot_be_decoded_are_refused_before_anything_runs(pair):
    target, draft = pair
    golden = answers(target, 2, "legal")
    for change, settings in (({"max_new_tokens": 510}, DecodeSettings()), ({}, DecodeSettings(draft_length=5000))):
        config = dataclasses.replace(CONFIG, **change)
        with pytest.raises(PipelineError, match="exceed"):
            evaluate(contestants(target, draft), golden, golden, settings, config, seed=0)
    for change in (
        {"batch_sizes": [1]}, {"temperatures": [-0.1]}, {"temperatures": [1e9]}, {"siblings": [Sibling("distilled", "x")]},
        {"siblings": [Sibling("a", "x"), Sibling("a", "y")]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(change))):
            dataclasses.replace(CONFIG, **change)
    for change in (
        {"draft_lengths": []}, {"draft_lengths": [0]}, {"timed_prompts": 0}, {"near_tie_gap": float("nan")}, {"max_new_tokens": 1},
        {"lossless_new_tokens": 1}, {"bootstrap_samples": 99},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(change))):
            dataclasses.replace(CONFIG, **change)
    with pytest.raises(ValueError, match="draft_length"):
        DecodeSettings(draft_length=0)
