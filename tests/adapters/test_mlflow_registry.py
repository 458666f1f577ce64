"""Model versions: self-contained, loadable offline, found by what they hold, under aliases that move."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
import torch
from another_machine import load_elsewhere
from fresh_store import fresh_store
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.adapters.mlflow_registry import MlflowStore
from pipeline.core.artifacts import fingerprint_files
from pipeline.core.errors import PipelineError

CARD = "---\nlibrary_name: transformers\n---\n# A draft\n"


def build_draft(folder: Path, dtype: torch.dtype, seed: int = 0) -> None:
    """A tiny Llama with tokenizer, template, generation config, draft.json and head ids, saved in `folder`."""
    torch.manual_seed(seed)
    words = {f"w{index}": index for index in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", unk_token="w0")
    wrapped.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.generation_config.max_new_tokens = 17
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)
    facts = {"fingerprint": fingerprint_files([folder / "model.safetensors"]), "dtype": str(dtype).split(".")[1]}
    (folder / "draft.json").write_text(json.dumps(facts))
    (folder / "head_token_ids.json").write_text("[1, 2, 3]")


def register(store: MlflowStore, draft: Path, model_name: str) -> tuple[str, str]:
    """Register `draft` in a run of its own; return the version and the run's id."""
    facts = json.loads((draft / "draft.json").read_text())
    metrics = draft.parent / "metrics.json"
    metrics.write_text("{}")
    with store.run("experiment", "run", {"gate": "smoke"}) as run_id:
        tags = {"fingerprint": facts["fingerprint"]}
        return store.register_version(run_id, model_name, draft, [metrics], CARD, facts["dtype"], tags), run_id


@pytest.fixture(autouse=True)
def network_off(monkeypatch):
    connect = socket.socket.connect

    def guarded(self, address):
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"the network is off: {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with fresh_store(MlflowStore, tmp_path_factory) as (made, root):
        yield made
    assert {path.name for path in root.iterdir()} == {"mlflow.db", "mlflow.db.lock", "mlruns"}


def test_versions_are_self_contained(store, tmp_path):
    """R05"""
    ids = [5, 9, 33, 2]
    expected = {}
    for alias, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        draft = tmp_path / "work" / alias
        build_draft(draft, dtype)
        with torch.no_grad():
            expected[alias] = AutoModelForCausalLM.from_pretrained(draft)(torch.tensor([ids])).logits
        weights = (draft / "model.safetensors").stat().st_size
        version, run_id = register(store, draft, "self-contained")
        store.set_alias("self-contained", alias, version)
        files = [path for path in _artifact_folder(store, run_id).rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) <= 1.2 * weights
        assert not [path for path in files if str(tmp_path).encode() in path.read_bytes()]
        names = {path.name for path in files if path.parent.name == "model"}
        assert names >= {"draft.json", "head_token_ids.json", "metrics.json", "README.md", "generation_config.json"}
    shutil.rmtree(tmp_path / "work")
    loaded = load_elsewhere(store.uri, "self-contained", ["fp32", "bf16"], ids, tmp_path)
    for alias, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for logits in loaded[alias]["logits"]:
            assert logits.dtype == dtype
            assert torch.equal(logits, expected[alias])
        assert loaded[alias]["words"].split() == ["w5", "w9", "w33", "w2"]
        assert "message.content" in loaded[alias]["template"]
        assert loaded[alias]["generation"] == 17


def _artifact_folder(store: MlflowStore, run_id: str) -> Path:
    return Path(store.client.download_artifacts(run_id, "draft"))


def test_aliases_move_and_versions_are_found(store, tmp_path):
    """R04: an alias is read both ways, and a search knows none."""
    versions = []
    for seed in (1, 2):
        draft = tmp_path / f"draft{seed}"
        build_draft(draft, torch.float32, seed)
        versions.append(register(store, draft, "moving")[0])
    assert versions == ["1", "2"]
    assert store.version_by_alias("moving", "candidate") is None
    for version in ("1", "2", "1"):
        store.set_alias("moving", "candidate", version)
        assert store.version_by_alias("moving", "candidate") == version
        assert store.aliases("moving") == {"candidate": version}
    fingerprint = json.loads((tmp_path / "draft2/draft.json").read_text())["fingerprint"]
    assert store.find_version("moving", {"fingerprint": fingerprint}) == "2"
    assert store.version_fingerprint("moving", "2") == fingerprint
    assert store.find_version("moving", {"fingerprint": "0" * 16}) is None
    assert store.find_version("no such model", {"fingerprint": fingerprint}) is None
    assert store.version_fingerprint("moving", "3") is None
    assert [str(item.version) for item in store.versions("moving")] == ["2", "1"]
    assert store.aliases("no such model") == store.model_tags("no such model") == {}
    with pytest.raises(PipelineError, match="refused"):
        store.set_alias("moving", "candidate", "9")


def test_newer_evidence_takes_the_place_of_the_older(store, tmp_path, monkeypatch):
    """A kill on the way leaves a version whose tag fits neither; the next call brings it up to date."""
    draft, metrics = tmp_path / "draft", tmp_path / "metrics.json"
    build_draft(draft, torch.float32)
    version, _ = register(store, draft, "measured-anew")
    metrics.write_text('{"newer": true}')
    tags = {"evidence": fingerprint_files([metrics]), "speedup": "1.5"}
    weights = (draft / "model.safetensors").read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store.client, "log_artifacts", killed)
        store.replace_evidence("measured-anew", version, [metrics], CARD, tags)
    assert store.version_tags("measured-anew", version)["evidence"] == "being replaced"
    store.replace_evidence("measured-anew", version, [metrics], "---\n---\n# Newer\n", tags)
    assert tags.items() <= store.version_tags("measured-anew", version).items()
    folder = store.download("measured-anew", version, "model", tmp_path)
    assert json.loads((folder / "metrics.json").read_text()) == {"newer": True}
    assert "# Newer" in (folder / "README.md").read_text()
    assert (folder / "model.safetensors").read_bytes() == weights
