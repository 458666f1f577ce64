"""diagnose: good pairs pass, bad ones are named in seconds, all failures are listed, without any weights."""

from __future__ import annotations

import re
import shutil
import sys
import time
import types
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from tiny_answers import answers_of
from tiny_models import tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BloomConfig,
    Gemma2Config,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
)

from pipeline import diagnose, stage
from pipeline.adapters import quantization
from pipeline.adapters.answer_files import write_answers
from pipeline.adapters.drafts import DraftConfig, initial_draft, save_draft
from pipeline.adapters.targets import Target
from pipeline.core import footprint
from pipeline.core.checks import Finding, Report
from pipeline.core.errors import PipelineError
from pipeline.core.models import ModelConfig
from pipeline.core.tiny import TEMPLATE, build_tiny_tokenizer

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """One project for the module: creating the registry's store takes seconds."""
    return tmp_path_factory.mktemp("project")


@pytest.fixture(autouse=True)
def project(root, monkeypatch):
    monkeypatch.setattr(stage, "PROJECT_ROOT", root)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(footprint, "matmul_speed", lambda *_: 1e10)


@pytest.fixture
def cfg():
    """The configuration of the smoke run; each test changes what it is about."""
    with initialize_config_dir(stage.CONF_DIR, version_base="1.3"):
        return compose("config", overrides=["experiment=smoke"])


def save(folder: Path, config, tokenizer=None) -> str:
    config.save_pretrained(folder)
    (tokenizer or build_tiny_tokenizer()).save_pretrained(folder)
    return str(folder)


def byte_tokenizer(size: int, start: int) -> PreTrainedTokenizerFast:
    """<eos>, then bytes in order from the byte number `start`, `size` ids in all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<eos>", *alphabet[start:], *alphabet[:start]][:size]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = TEMPLATE
    return fast


def with_pretrained_draft(cfg, target: str, draft: str):
    cfg.target.id = target
    cfg.draft.update({"init": "pretrained", "id": draft, "keep_layers": []})
    return cfg


def findings(cfg) -> dict[str, Finding]:
    report = diagnose.diagnose(stage.typed_config(cfg, diagnose.Config), stage.input_path(""))
    return {finding.check: finding for finding in report.findings}


def failed(found: dict[str, Finding]) -> list[str]:
    return [name for name, finding in found.items() if finding.result == "failed"]


def test_the_tiny_pair_passes(cfg, capsys):
    stage.execute(diagnose.run, diagnose.Config, cfg)
    output = capsys.readouterr()
    assert "failed" not in output.out and "not run" not in output.out and output.err.count("error") == 0
    assert "target 164,928, draft 90,944" in " ".join(output.out.split())


def test_a_recurrent_target_is_named_within_seconds(cfg, tmp_path, capsys):
    cfg.target.id = save(tmp_path / "mamba", MambaConfig(vocab_size=264, hidden_size=32, num_hidden_layers=2))
    started = time.monotonic()
    with pytest.raises(SystemExit) as stopped:
        stage.execute(diagnose.run, diagnose.Config, cfg)
    assert time.monotonic() - started < 10
    assert stopped.value.code == 1
    errors = capsys.readouterr().err
    assert f"target cache: {tmp_path / 'mamba'}: its cache cannot be rolled back by position" in errors
    found = findings(cfg)
    assert failed(found) == ["target cache"]
    assert (found["draft"].result, found["draft"].detail) == ("not run", "needs: target cache")
    assert found["registry"].result == "ok"


def test_a_recurrent_draft_is_named(cfg, tmp_path):
    draft = save(tmp_path / "mamba", MambaConfig(vocab_size=264, hidden_size=32, num_hidden_layers=2))
    found = findings(with_pretrained_draft(cfg, "builtin:tiny", draft))
    assert failed(found) == ["draft"]
    assert f"{draft}: its cache cannot be rolled back" in found["draft"].detail


def test_another_tokenizer_is_refused_with_the_sizes(cfg, tmp_path):
    target = save(tmp_path / "target", LlamaConfig(vocab_size=264, **SHAPE), byte_tokenizer(257, start=0))
    draft = save(tmp_path / "draft", LlamaConfig(vocab_size=260, **SHAPE), byte_tokenizer(257, start=1))
    found = findings(with_pretrained_draft(cfg, target, draft))
    assert failed(found) == ["draft"]
    assert "target: 257 tokens, 264 embedding rows; draft: 257 tokens, 260 embedding rows" in found["draft"].detail
    assert found["disk"].result == "not run"


def test_padded_embeddings_of_two_sizes_pass_with_a_warning(cfg, tmp_path):
    tokenizer = byte_tokenizer(100, start=0)
    target = save(tmp_path / "target", LlamaConfig(vocab_size=112, **SHAPE), tokenizer)
    draft = save(tmp_path / "draft", LlamaConfig(vocab_size=104, **SHAPE), tokenizer)
    found = findings(with_pretrained_draft(cfg, target, draft))
    assert not failed(found)
    assert found["draft"].result == "warning"
    assert "100 shared token ids; ids from 100 on are never drafted" in found["draft"].detail
    assert "100 tokens, 112 embedding rows, of which the last 12 are padding" in found["target tokenizer"].detail


@pytest.mark.parametrize("change", ["pad_token", "added_token"])
def test_harmless_differences_of_tokenizers_pass_with_a_warning(cfg, tmp_path, change):
    tokenizer = build_tiny_tokenizer()
    if change == "pad_token":
        tokenizer.pad_token = None
    else:
        tokenizer.add_tokens(["<x>"])
    target = save(tmp_path / "target", LlamaConfig(vocab_size=264, **SHAPE), tokenizer)
    draft = save(tmp_path / "draft", LlamaConfig(vocab_size=264, **SHAPE))
    found = findings(with_pretrained_draft(cfg, target, draft))
    assert not failed(found)
    assert found["draft"].result == "warning" and "259 shared token ids" in found["draft"].detail
    expected = {"pad_token": "pad_token differs: None", "added_token": "ids from 259 on are never drafted"}
    assert expected[change] in found["draft"].detail


def test_layers_that_the_target_lacks(cfg):
    cfg.draft.keep_layers = [0, 4]
    found = findings(cfg)
    assert failed(found) == ["draft"]
    assert "draft.keep_layers=[0, 4] does not fit a target of 4 layers" in found["draft"].detail


def smoke(*overrides: str):
    with initialize_config_dir(stage.CONF_DIR, version_base="1.3"):
        return compose("config", overrides=["experiment=smoke", *overrides])


def test_layers_to_be_chosen_are_counted_at_most():
    choice = ["draft=pruned_chosen", "draft.keep_layers=[]", "draft.layer_choice.layer_counts=[1,3]"]
    found = findings(smoke(*choice))
    assert not failed(found)
    assert found["draft"].detail.startswith("pruned, the best of [1, 3] layers of the target")
    named = findings(smoke("draft.keep_layers=[0,1,3]"))
    assert found["parameters"].detail == named["parameters"].detail
    choice[-1] = "draft.layer_choice.layer_counts=[4]"
    assert "layer_counts=[4] does not fit a target of 4 layers" in findings(smoke(*choice))["draft"].detail


def test_an_architecture_is_built_and_its_embeddings_are_looked_after():
    architecture = ["draft=from_config", f"draft.id={stage.CONF_DIR}/draft/wide_2_layers.json"]
    found = findings(smoke(*architecture))
    assert failed(found) == ["draft"]
    assert "would keep random embeddings: this draft is 576 wide" in found["draft"].detail
    found = findings(smoke(*architecture, "distill.freeze_embeddings=false"))
    assert not failed(found) and "259 shared token ids" in found["draft"].detail


def test_a_champion_that_is_not_there_yet_is_named():
    found = findings(smoke("draft=champion"))
    assert failed(found) == ["draft"]
    assert "no models:/tiny-legal-draft@champion" in found["draft"].detail


@pytest.mark.parametrize("fault", ["import", "probe"])
def test_quantisation_that_cannot_run_is_named_within_seconds(cfg, monkeypatch, fault):
    """L09"""

    def broken(*_):
        raise RuntimeError("no kernel image")

    monkeypatch.setitem(sys.modules, "bitsandbytes", None if fault == "import" else types.ModuleType("bitsandbytes"))
    monkeypatch.setattr(quantization, "_probe", broken)
    with_pretrained_draft(cfg, "builtin:tiny", "builtin:tiny").target.quantization = "4bit"
    started = time.monotonic()
    found = findings(cfg)
    assert time.monotonic() - started < 10
    assert failed(found) == ["target quantization"]
    assert "target.quantization=4bit" in found["target quantization"].detail
    assert "target.quantization=none" in found["target quantization"].remedy
    assert found["draft"].result == "ok"


@pytest.mark.parametrize("fault", ["import", "probe"])
def test_an_optimiser_that_cannot_run_is_named_before_anything_is_answered(cfg, monkeypatch, fault):
    """L09"""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None if fault == "import" else types.ModuleType("bitsandbytes"))
    cfg.distill.optimizer = "adamw_8bit"
    found = findings(cfg)
    assert failed(found) == ["optimizer"]
    assert "distill.optimizer=adamw_8bit" in found["optimizer"].detail
    assert "distill.optimizer=adamw," in found["optimizer"].remedy


@pytest.mark.parametrize(
    ("folder", "words"),
    [("data/draft", "DVC removes it"), ("./data/../data/draft", "DVC removes it"), ("models", "no draft.json")],
)
def test_a_reference_draft_that_will_not_be_there_is_named_before_anything_is_answered(folder, words, cfg):
    cfg.distill.selected_share, cfg.distill.reference_draft = 0.5, folder
    found = findings(cfg)
    assert failed(found) == ["reference draft"]
    assert words in found["reference draft"].detail and "copy" in found["reference draft"].remedy


def test_layers_cannot_come_out_of_a_quantised_target(cfg, monkeypatch):
    monkeypatch.setattr(quantization, "_probe", lambda *_: None)
    cfg.target.quantization = "8bit"
    assert "cannot cut layers out of a target with quantization=8bit" in findings(cfg)["draft"].detail


def test_an_unreachable_registry_is_named_within_seconds(cfg):
    cfg.registry.tracking_uri = "http://127.0.0.1:9"
    started = time.monotonic()
    found = findings(cfg)
    assert time.monotonic() - started < 10
    assert failed(found) == ["registry"]
    assert "http://127.0.0.1:9" in found["registry"].detail


def test_all_failures_are_listed(cfg, tmp_path, monkeypatch, capsys):
    cfg.target.id = save(tmp_path / "mamba", MambaConfig(vocab_size=264, hidden_size=32, num_hidden_layers=2))
    cfg.target.quantization = "8bit"
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    cfg.domain.sources[0].path = "package:no-such-package/*.txt"
    cfg.domain.sources[1].path = "nowhere/*.py"
    cfg.domain.sources[2].update({"reader": "hub", "path": "some/texts"})
    cfg.registry.tracking_uri = "http://127.0.0.1:9"
    with pytest.raises(SystemExit):
        stage.execute(diagnose.run, diagnose.Config, cfg)
    *lines, last = capsys.readouterr().err.strip().splitlines()
    sources = ["source licence", "source stdlib", "source docstrings"]
    assert [line.split(":")[0] for line in lines] == ["target cache", "target quantization", *sources, "registry"]
    assert all(" Remedy: " in line for line in lines)
    assert last.startswith("error: 6 of ")


def test_a_missing_target_leaves_the_other_checks(cfg):
    cfg.target.id = "./no/such/folder"
    found = findings(cfg)
    assert failed(found) == ["target configuration"]
    assert found["draft"].detail == "needs: target cache, target tokenizer"
    assert {found[name].result for name in ("target quantization", "source stdlib", "registry")} == {"ok"}


def test_too_little_memory_and_disk(cfg, monkeypatch):
    monkeypatch.setattr(footprint, "free_memory_bytes", lambda *_, **__: 6 << 20)
    monkeypatch.setattr(diagnose.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1 << 20))
    found = findings(cfg)
    assert failed(found) == ["memory of distill", "memory of evaluate", "disk"]
    assert "6.0 MiB free: too little memory" in found["memory of distill"].detail
    for words in ("target.device_map=auto", "tensor parallelism", "through the serving engine"):
        assert words in found["memory of evaluate"].remedy
    monkeypatch.setattr(footprint, "free_memory_bytes", lambda *_, **__: 4 << 20)
    assert findings(cfg)["memory of generate"].result == "warning"
    monkeypatch.setattr(footprint, "free_memory_bytes", lambda *_, **__: None)
    assert findings(cfg)["memory of generate"].result == "warning"


def test_prompts_must_leave_room_for_answers(cfg, tmp_path):
    config = LlamaConfig(vocab_size=264, **{**SHAPE, "max_position_embeddings": 128, "num_hidden_layers": 4})
    cfg.target.id = save(tmp_path / "short", config)
    found = findings(cfg)
    assert failed(found) == ["prompt length"]
    assert "exceed 128 positions" in found["prompt length"].detail


def test_instructions_need_a_chat_template(cfg, tmp_path):
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = None
    config = LlamaConfig(vocab_size=264, **{**SHAPE, "num_hidden_layers": 4})
    cfg.target.id = save(tmp_path / "base", config, tokenizer)
    found = findings(cfg)
    assert failed(found) == ["prompt length"]
    assert "no chat template" in found["prompt length"].detail


@pytest.mark.parametrize(
    ("eos_token_id", "result", "detail"),
    [
        (263, "failed", "lie beyond the 259 real tokens"),
        (2, "warning", "'<|endoftext|>', is not among them"),
        ([0, 2], "ok", "0 '<|endoftext|>', 2 '<|im_end|>'"),
    ],
)
def test_what_ends_an_answer(cfg, tmp_path, eos_token_id, result, detail):
    config = LlamaConfig(vocab_size=264, **{**SHAPE, "num_hidden_layers": 4, "eos_token_id": eos_token_id})
    cfg.target.id = save(tmp_path / "target", config)
    finding = findings(cfg)["end of answers"]
    assert finding.result == result and detail in finding.detail


def test_rules_of_the_generation_config_are_not_ignored_silently(cfg, tmp_path):
    """D09"""
    config = LlamaConfig(vocab_size=264, **{**SHAPE, "num_hidden_layers": 4, "eos_token_id": 0})
    cfg.target.id = save(tmp_path / "target", config)
    assert findings(cfg)["generation rules"].result == "ok"
    GenerationConfig(eos_token_id=0, repetition_penalty=1.05, min_new_tokens=0).save_pretrained(tmp_path / "target")
    finding = findings(cfg)["generation rules"]
    assert finding.result == "warning" and "repetition_penalty=1.05" in finding.detail
    assert "min_new_tokens" not in finding.detail


def test_a_draft_that_distillation_cannot_train(cfg, tmp_path):
    config = Gemma2Config(vocab_size=264, head_dim=8, **{**SHAPE, "num_hidden_layers": 4})
    cfg.target.id = save(tmp_path / "capped", config)
    found = findings(cfg)
    assert failed(found) == ["draft head"]
    assert "final_logit_softcapping" in found["draft head"].detail


def test_a_target_in_the_loop_that_distillation_cannot_reproduce(cfg, tmp_path):
    capped = save(tmp_path / "capped", Gemma2Config(vocab_size=264, head_dim=8, **SHAPE))
    with_pretrained_draft(cfg, capped, save(tmp_path / "plain", LlamaConfig(vocab_size=264, **SHAPE)))
    assert findings(cfg)["draft head"].result == "ok", "its stored probabilities are those of its own logits"
    cfg.distill.target = "online"
    found = findings(cfg)["draft head"]
    assert found.result == "failed" and "target" in found.detail and "distill.target=stored" in found.remedy


def test_a_target_whose_layers_cannot_be_taken_out(cfg, tmp_path):
    config = GPT2Config(vocab_size=264, n_embd=32, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0)
    cfg.target.id = save(tmp_path / "gpt2", config)
    found = findings(cfg)
    assert failed(found) == ["parameters"]
    assert "gpt2 target cannot be taken out" in found["parameters"].detail


def test_a_target_that_takes_no_positions(cfg, tmp_path):
    config = BloomConfig(vocab_size=264, hidden_size=32, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0)
    cfg.target.id = save(tmp_path / "bloom", config)
    found = findings(cfg)
    assert failed(found) == ["parameters"]
    assert "takes no position_ids" in found["parameters"].detail


def test_a_draft_made_from_the_target_shares_template_family_and_context(cfg):
    found = findings(cfg)
    assert found["chat template"].detail.startswith("the target's")
    assert found["family"].detail == "one: llama"
    assert (found["context length"].result, found["context length"].detail) == ("ok", "target 1024, draft 1024 tokens")


@pytest.mark.parametrize(
    ("template", "result", "words"),
    [
        (TEMPLATE, "ok", "both render a user's message alike"),
        (TEMPLATE + "{# another source, the same text #}", "ok", "both render a user's message alike"),
        (TEMPLATE.replace("<|im_start|>", "@"), "warning", "they render a user's message differently"),
        (None, "warning", "the draft has none"),
    ],
)
def test_chat_templates_are_compared_by_what_they_render(cfg, tmp_path, template, result, words):
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = template
    draft = save(tmp_path / "draft", LlamaConfig(vocab_size=264, **SHAPE), tokenizer)
    found = findings(with_pretrained_draft(cfg, "builtin:tiny", draft))
    assert found["chat template"].result == result and words in found["chat template"].detail


def test_another_family_and_a_shorter_context_are_named(cfg, tmp_path):
    shape = {name: value for name, value in SHAPE.items() if name != "max_position_embeddings"}
    draft = save(tmp_path / "draft", MistralConfig(vocab_size=264, **shape, max_position_embeddings=512))
    found = findings(with_pretrained_draft(cfg, "builtin:tiny", draft))
    assert found["family"].detail.startswith("two: the target is llama, the draft mistral")
    assert found["context length"].result == "warning"
    assert (
        "target 1024, draft 512 tokens; what outgrows 512 tokens is decoded plainly" in found["context length"].detail
    )


def test_the_service_is_sized_at_the_given_load_and_memory():
    """Half of the tiny target's layers are kept, so that its cache grows by half."""
    load = ["diagnose.batch=3", "diagnose.context_tokens=256", "draft.dtype=float32"]
    found = findings(smoke(*load, "diagnose.memory_gib=0.01"))
    assert found["load served"].detail.startswith("3 requests of 256 tokens")
    weights = {"target": 164_928 * 4, "draft": 90_944 * 4}
    cache = {"target": 4 * 256 * 64 * 4, "draft": 2 * 256 * 64 * 4}
    memory = 0.01 * 2**30
    alone = int((memory - weights["target"]) // cache["target"])
    both = int((memory - sum(weights.values())) // sum(cache.values()))
    served = found["memory of serving"]
    assert served.result == "ok"
    assert f"fit {alone} requests without the draft, {both} with it: {alone - both} fewer" in served.detail
    assert f"target weights {weights['target'] / 2**20:.1f} MiB" in served.detail
    assert f"draft cache {3 * cache['draft'] / 2**20:.1f} MiB" in served.detail
    served = findings(smoke(*load, "diagnose.memory_gib=0.0015"))["memory of serving"]
    assert served.result == "warning" and "the load of 3 requests does not fit" in served.detail
    assert "roi.price_per_hour_after" in served.remedy


def test_break_even_acceptance_follows_from_bytes(cfg):
    """(1 - a^2) / (1 - a) = 1 + a = 1 + c at k = 1 where a pass over two tokens costs what one over one does."""
    cfg.diagnose.context_tokens = 32
    cfg.diagnose.batch = 1
    cfg.draft.dtype = "float32"
    cfg.decode.draft_half_weights = False
    found = findings(cfg)
    step = {"target": 164_928 * 4 + 4 * 32 * 64 * 4, "draft": (90_944 - (264 - 128) * 64) * 4 + 2 * 32 * 64 * 4}
    c = step["draft"] / step["target"]
    assert found["cost ratio (estimate)"].detail.startswith(f"c = {c:.3f}: ")
    assert "head trimmed to 128 tokens" in found["cost ratio (estimate)"].detail
    assert f"k = 1 {100 * c:.1f} %, k = 2 " in found["break-even acceptance"].detail


def test_a_draft_as_large_as_the_target_pays_at_no_acceptance(cfg):
    cfg.distill.head_tokens = 1000
    cfg.draft.dtype = "float32"
    cfg.decode.draft_half_weights = False
    found = findings(with_pretrained_draft(cfg, "builtin:tiny", "builtin:tiny"))
    assert found["cost ratio (estimate)"].detail.startswith("c = 1.000")
    assert found["break-even acceptance"].detail.count("100.0 %") == 3


def test_drafts_are_scored_only_on_request_and_on_answers_that_are_there(cfg):
    assert not [name for name in findings(cfg) if name.startswith("token acceptance")]
    cfg.diagnose.score = True
    found = findings(cfg)
    assert failed(found) == ["stored answers"]
    assert "dvc repro generate" in found["stored answers"].remedy
    assert found["token acceptance of tiny-2-layers"].result == "not run"


def test_the_configured_draft_is_scored_from_stored_answers(cfg, root, tmp_path):
    model = tiny_llama(vocabulary=259, num_hidden_layers=4, std=0.2)
    model.save_pretrained(tmp_path / "target")
    build_tiny_tokenizer().save_pretrained(tmp_path / "target")
    cfg.target.id = str(tmp_path / "target")
    cfg.diagnose.score = True
    target = Target(ModelConfig(name="t", id=cfg.target.id, dtype="float32"), root)
    for split in ("train", "dev"):
        path = root / "data" / "answers" / split / "00000.parquet"
        write_answers(path, answers_of(model, 3), {**target.facts, "target_domain": "legal"})
    found = findings(cfg)
    shutil.rmtree(root / "data" / "answers")
    assert not failed(found)
    assert found["stored answers"].detail == "3 of dev, 3 of train for the trimmed head"
    scored = found["token acceptance of tiny-2-layers"].detail
    assert scored.startswith("before distillation, greedy: legal ") and "; all with the full head " in scored
    assert scored.endswith("the target's weights were loaded, since it starts from them")


def test_each_candidate_has_a_line_and_a_sibling_that_is_not_to_be_had_is_no_failure(cfg, monkeypatch):
    def scored(candidate, *_):
        if candidate.name == "broken":
            raise PipelineError("no weights", "look")
        entry = {"value": 0.5, "interval": None, "count": 1, "reason": None}
        return {"all": {"token_acceptance_trimmed_head": entry, "token_acceptance_full_head": entry}}

    monkeypatch.setattr(diagnose, "score_start", scored)
    monkeypatch.setattr(diagnose, "_stored_answers", lambda *_: diagnose.Passed(None, "there"))
    monkeypatch.setattr(diagnose, "score_lookup", lambda *_: scored(DraftConfig("lookup", "pretrained", id="x/y")))
    siblings = [DraftConfig(name, "pretrained", id="x/y") for name in ("broken", "whole")]
    cfg.draft.name = "broken"
    report = Report()
    diagnose._scores(report, stage.typed_config(cfg, diagnose.Config), siblings, stage.input_path(""))
    assert [(finding.check, finding.result) for finding in report.findings[1:]] == [
        ("token acceptance of prompt lookup", "ok"),
        ("token acceptance of broken", "failed"),
        ("token acceptance of broken", "warning"),
        ("token acceptance of whole", "ok"),
    ]
    assert "all 50.0 %" in report.findings[4].detail and "weights were loaded" not in report.findings[4].detail


def test_siblings_count_in_the_memory_of_evaluate_and_a_missing_one_is_named(cfg, tmp_path):
    alone = findings(cfg)
    assert (alone["other candidates"].result, alone["other candidates"].detail) == ("ok", "none")
    model = tiny_llama(vocabulary=264, num_hidden_layers=2, hidden_size=512, intermediate_size=1024)
    model.save_pretrained(tmp_path / "large")
    build_tiny_tokenizer().save_pretrained(tmp_path / "large")
    named = [{"name": "large", "id": str(tmp_path / "large")}, {"name": "gone", "id": str(tmp_path / "gone")}]
    cfg.evaluate.siblings = named
    found = findings(cfg)
    others = found["other candidates"]
    assert others.result == "warning" and others.detail.startswith(f"large {model.num_parameters():,}; gone: ")
    before, after = (re.search(r"drafts ([\d.]+) MiB", each["memory of evaluate"].detail)[1] for each in (alone, found))
    in_half_precision = 2 * model.num_parameters() / (1 << 20)
    assert float(after) - float(before) > 0.99 * in_half_precision


@pytest.mark.parametrize(
    ("override", "check", "words"),
    [
        ("decode.draft_length=500", "draft lengths", "A draft length of 500 exceeds"),
        ("gate.checks.0.metric=speed", "gate", "has the metric 'speed'"),
        ("gate.checks.0.domain=poems", "gate", "has the domain 'poems'"),
        ("gate.checks=[]", "gate", "no checks"),
    ],
)
def test_what_evaluate_and_gate_would_refuse_is_refused_before_anything_is_generated(override, check, words):
    with initialize_config_dir(stage.CONF_DIR, version_base="1.3"):
        found = findings(compose("config", overrides=["experiment=smoke", override]))
    assert failed(found) == [check] and words in found[check].detail


def test_a_load_on_the_money_sheet_that_is_not_measured_is_a_warning(cfg):
    cfg.roi.batch = 32
    found = findings(cfg)["money"]
    assert found.result == "warning" and "at batch 32, which evaluate does not measure (1" in found.detail


def test_a_champion_that_evaluate_would_refuse_is_refused_before_anything_is_generated(cfg, root):
    path = root / stage.CHAMPION_FILE
    path.parent.mkdir(parents=True)
    path.write_text('{"schema": "domain-draft/unknown-champion", "schema_version": 1}')
    found = findings(cfg)
    shutil.rmtree(path.parent)
    assert failed(found) == ["other candidates"] and "--list" in found["other candidates"].remedy


def test_money_that_cannot_be_is_refused(cfg):
    cfg.roi.price_per_hour_after = -1
    with pytest.raises(PipelineError, match="roi.price_per_hour_after must be > 0, got -1"):
        stage.typed_config(cfg, diagnose.Config)


def test_what_was_distilled_already_is_scored_too(cfg, root, tmp_path):
    model = tiny_llama(vocabulary=259, num_hidden_layers=4, std=0.2)
    model.save_pretrained(tmp_path / "target")
    build_tiny_tokenizer().save_pretrained(tmp_path / "target")
    cfg.target.id = str(tmp_path / "target")
    cfg.diagnose.score, cfg.decode.temperature = True, 0.7
    target = Target(ModelConfig(name="t", id=cfg.target.id, dtype="float32"), root)
    for split in ("train", "dev"):
        path = root / "data" / "answers" / split / "00000.parquet"
        write_answers(path, answers_of(model, 3), {**target.facts, "target_domain": "legal"})
    start = DraftConfig("whole", "pruned", keep_layers=[0, 1, 2, 3], dtype="float32")
    save_draft(root / "data" / "draft", initial_draft(start, target, root), target, list(range(259)), start)
    found = findings(cfg)
    shutil.rmtree(root / "data")
    assert not failed(found)
    scored = found["token acceptance of data/draft"].detail
    assert found["token acceptance of data/draft"].result == "ok"
    assert scored.startswith("at temperature 0.7 (estimated from the probabilities that are stored): legal ")
    assert float(re.search(r"legal ([\d.]+) %", scored)[1]) > 60, (
        "the target itself, but for the probability that is not stored"
    )
