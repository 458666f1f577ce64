"""Promotion, roll-back and listing on the embedded store and on a server, and what killed calls and moved aliases leave."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import shutil
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from another_machine import load_elsewhere
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow_server import mlflow_server
from promotion_evidence import KEY, made_metrics, made_verdict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline import promote, register, stage
from pipeline.adapters.mlflow_registry import MlflowStore
from pipeline.adapters.mlflow_store import check_store, resolve_tracking_uri, tag_texts
from pipeline.core.artifacts import fingerprint_files, fingerprint_weights, read_json, write_json
from pipeline.core.errors import PipelineError
from pipeline.core.model_card import Evidence, headline_tags, identity_tags
from pipeline.register import RegistryConfig


class Cut(BaseException):
    """Takes the place of a kill."""


@dataclass
class Registry:
    """A registered model of a store, as a user of the project `root` has it."""

    root: Path
    config: RegistryConfig
    store: MlflowStore

    @property
    def name(self) -> str:
        return self.config.model_name

    def add(self, passed: bool = True, **metrics) -> str:
        """A new version under the alias candidate, with no weights; returns its number."""
        draft = {"compatibility_key": metrics.get("key", KEY), "fingerprint": f"{metrics}", "dtype": "float32"}
        evidence = Evidence(draft, made_metrics(**metrics, fingerprint=f"{metrics}"), {}, made_verdict(passed))
        files = [self.root / "metrics.json", self.root / "verdict.json"]
        write_json(files[0], "domain-draft/metrics", 1, evidence.metrics)
        write_json(files[1], "domain-draft/verdict", 1, evidence.verdict)
        client = self.store.client
        with self.store.run("promotion", self.name, {}) as run_id:
            self.store.log_files(run_id, {f"draft/model/{file.name}": file for file in files})
            with contextlib.suppress(MlflowException):
                client.create_registered_model(self.name)
            tags = {**identity_tags(evidence), **headline_tags(evidence), "evidence": fingerprint_files(files)}
            source = f"{client.get_run(run_id).info.artifact_uri}/draft"
            version = str(client.create_model_version(self.name, source, run_id, tags=tag_texts(tags)).version)
        self.store.set_alias(self.name, "candidate", version)
        return version

    def aliases(self) -> tuple[str | None, str | None]:
        """(champion, previous), read both ways and held against the file."""
        found = tuple(self.store.version_by_alias(self.name, alias) for alias in ("champion", "previous"))
        known = self.store.aliases(self.name)
        assert found == (known.get("champion"), known.get("previous"))
        assert self.file() is None and found[0] is None or self.file()["version"] == found[0]
        return found

    def file(self) -> dict | None:
        path = self.root / promote.CHAMPION_FILE
        return read_json(path, "domain-draft/champion", 1) if path.exists() else None

    def how(self, version: str) -> str | None:
        return self.store.version_tags(self.name, version).get("promotion")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("a project")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with mlflow_server(tmp_path_factory.mktemp("server")) as uri:
        yield uri


@pytest.fixture(autouse=True)
def project(root, tmp_path, monkeypatch) -> Path:
    """The project without a champion's file; the working directory, which must stay empty, is elsewhere."""
    monkeypatch.setattr(stage, "PROJECT_ROOT", root)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv(
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false"
    )  # promote's own setting, here undone after the test
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    shutil.rmtree(root / "data", ignore_errors=True)
    yield root
    assert list(folder.iterdir()) == []


def registry_at(uri: str | None, root: Path, request) -> Registry:
    """A model of its own for the test."""
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    config = RegistryConfig(uri, "domain-draft", 10.0, name, "candidate")
    resolved = resolve_tracking_uri(uri, root)
    check_store(resolved, 10.0)
    return Registry(root, config, MlflowStore(resolved))


@pytest.fixture
def embedded(root, project, request) -> Registry:
    return registry_at(None, root, request)


@pytest.fixture(params=["embedded", "server"])
def registry(root, project, request) -> Registry:
    return registry_at(request.getfixturevalue("server") if request.param == "server" else None, root, request)


def test_promotion_of_one_after_the_other_and_back(registry, capsys):
    """R04: first promotion, the same version twice, v1 v2 v1."""
    first = registry.add(acceptance=0.5, speedup=1.3)
    promote.promote(registry.config)
    assert registry.aliases() == (first, None)
    assert registry.how(first) == "passed the gate 'default'"
    before = (registry.root / promote.CHAMPION_FILE).read_bytes()
    promote.promote(registry.config)
    assert "is the champion already" in capsys.readouterr().out
    assert registry.aliases() == (first, None)
    assert (registry.root / promote.CHAMPION_FILE).read_bytes() == before
    second = registry.add(acceptance=0.6, speedup=1.5)
    promote.promote(registry.config)
    assert registry.aliases() == (second, first)
    assert registry.how(second) == (
        "passed the gate 'default', beats version 1: acceptance_rate 0.6 (0.58 to 0.62) against 0.5 (0.48 to 0.52),"
        " speedup 1.5 (1.48 to 1.52) against 1.3 (1.28 to 1.32)"
    )
    registry.store.set_alias(registry.name, "candidate", first)
    with pytest.raises(PipelineError, match="worse than version 2, the champion"):
        promote.promote(registry.config)
    assert registry.aliases() == (second, first)
    promote.promote(registry.config, force="the newer one stutters")
    assert registry.aliases() == (first, second)
    assert registry.how(first) == "forced: the newer one stutters"


def test_what_the_file_says(registry):
    version = registry.add(acceptance=0.5, speedup=1.3)
    promote.promote(registry.config)
    document = registry.file()
    assert document == {
        "schema": "domain-draft/champion",
        "schema_version": 1,
        "model_name": registry.name,
        "version": version,
        "fingerprint": registry.store.version_fingerprint(registry.name, version),
        "compatibility_key": KEY,
        "domain": "legal",
        "tracking_uri": registry.config.tracking_uri,
        "metrics": document["metrics"],
    }
    made = made_metrics(acceptance=0.5, speedup=1.3, fingerprint=document["fingerprint"])
    assert document["metrics"] == {"schema": "domain-draft/metrics", "schema_version": 1, **made}
    assert (registry.config.tracking_uri is None) == registry.store.uri.startswith("sqlite")


def test_rollback_and_back_again(registry):
    with pytest.raises(PipelineError, match="has no champion in"):
        promote.rollback(registry.config)
    registry.add(acceptance=0.5)
    promote.promote(registry.config)
    with pytest.raises(PipelineError, match="has no previous champion to go back to"):
        promote.rollback(registry.config)
    registry.add(acceptance=0.6)
    promote.promote(registry.config)
    promote.rollback(registry.config)
    assert registry.aliases() == ("1", "2")
    assert registry.how("1") == "rolled back from version 2"
    promote.rollback(registry.config)
    assert registry.aliases() == ("2", "1")


def test_what_failed_its_gate_is_refused_unless_forced(registry):
    registry.add(passed=False)
    with pytest.raises(PipelineError, match="not promoted: the gate 'default' failed: speedup") as error:
        promote.promote(registry.config)
    assert "--force REASON" in error.value.remedy
    assert registry.aliases() == (None, None)
    for blank in ("", " "):
        with pytest.raises(PipelineError, match="no reason"):
            promote.promote(registry.config, force=blank)
    promote.promote(registry.config, force="a demonstration")
    assert registry.aliases() == ("1", None)
    registry.add(domain="code", acceptance=0.9)
    with pytest.raises(PipelineError, match="its domain is 'code', the champion's 'legal'"):
        promote.promote(registry.config)
    assert registry.aliases() == ("1", None)


def test_the_list(registry, capsys):
    promote.show(registry.config)
    assert f"{registry.name} has no versions" in capsys.readouterr().out
    registry.add(acceptance=0.5)
    promote.promote(registry.config)
    registry.add(acceptance=None, passed=False, speedup=1.25, k=4)
    capsys.readouterr()
    promote.show(registry.config)
    printed = capsys.readouterr().out
    rows = [re.split(" {2,}", line.strip()) for line in printed.splitlines() if re.match(r" +\d ", line)]
    assert [row[:-1] for row in rows] == [
        ["2", "candidate", "failed (default)", "1.25 (1.23 to 1.27)", "not measured", "0.6", "4", "float32"],
        ["1", "champion", "passed (default)", "1.3 (1.28 to 1.32)", "0.5", "0.6", "3", "float32"],
    ]
    assert "champion: version 1 (passed the gate 'default')" in printed


def test_an_alias_moved_by_hand_is_said_and_the_file_mended(registry, capsys):
    for acceptance in (0.5, 0.6, 0.7):
        registry.add(acceptance=acceptance)
        promote.promote(registry.config)
    registry.store.set_alias(registry.name, "champion", "1")
    assert registry.file()["version"] == "3"
    capsys.readouterr()
    promote.show(registry.config)
    assert "named version 3, the registry's champion is version 1: written anew" in capsys.readouterr().out
    assert registry.file()["metrics"]["candidates"]["distilled"]["legal"]["acceptance_rate"]["value"] == 0.5
    registry.store.set_alias(registry.name, "champion", "2")
    promote.promote(registry.config)
    assert "named version 1, the registry's champion is version 2" in capsys.readouterr().out
    assert registry.aliases() == ("3", "2")
    registry.store.client.delete_registered_model_alias(registry.name, "champion")
    promote.show(registry.config)
    assert "named version 3, the registry has no champion: removed" in capsys.readouterr().out
    assert registry.aliases() == (None, "2")


@pytest.mark.parametrize("elsewhere", ["empty", "another version 1"])
def test_a_store_that_lacks_the_champion_does_not_take_its_figures_away(embedded, tmp_path, elsewhere):
    """They may be the only copy: another store was named, or this one was lost."""
    embedded.add(acceptance=0.5)
    promote.promote(embedded.config)
    path = embedded.root / promote.CHAMPION_FILE
    before = path.read_bytes()
    uri = f"sqlite:///{tmp_path}/other.db"
    check_store(uri, 10.0)
    other = Registry(embedded.root, dataclasses.replace(embedded.config, tracking_uri=uri), MlflowStore(uri))
    if elsewhere != "empty":
        other.add(acceptance=0.7)
    for call_it in (promote.show, *([promote.promote] if elsewhere != "empty" else [])):
        with pytest.raises(PipelineError, match=f"version 1 .*{re.escape(uri)} lacks") as error:
            call_it(other.config)
        assert "MLFLOW_TRACKING_URI" in error.value.remedy and path.read_bytes() == before
    promote.show(embedded.config)
    assert path.read_bytes() == before


def test_a_file_that_is_missing_broken_or_old_is_written_anew(embedded, capsys):
    embedded.add(acceptance=0.5)
    promote.promote(embedded.config)
    path = embedded.root / promote.CHAMPION_FILE
    whole = path.read_text()
    path.unlink()
    promote.show(embedded.config)
    assert "was missing" in capsys.readouterr().out and path.read_text() == whole
    path.write_text(whole[:100])
    promote.show(embedded.config)
    assert "is not valid JSON" in capsys.readouterr().out and path.read_text() == whole
    path.write_text(whole.replace('"value": 0.5,', '"value": 0.55,'))  # the same weights were measured anew since
    older = path.read_text()
    promote.show(embedded.config)
    assert "data/champion" not in capsys.readouterr().out and path.read_text() == older, "nothing needs to run again"


def test_the_file_of_another_model_is_left_until_there_is_a_champion_to_replace_it(embedded, capsys):
    embedded.add()
    promote.promote(embedded.config)
    other = Registry(
        embedded.root, RegistryConfig(None, "domain-draft", 10.0, "another-model", "candidate"), embedded.store
    )
    other.add()
    promote.show(other.config)
    assert f"holds the champion of {embedded.name}" in capsys.readouterr().out
    assert embedded.file()["model_name"] == embedded.name
    promote.promote(other.config)
    assert other.file()["model_name"] == "another-model"
    promote.promote(embedded.config)  # already champion of its model: its file again
    assert embedded.file()["model_name"] == embedded.name


WRITES = [
    (MlflowClient, "set_registered_model_tag"),
    (MlflowClient, "set_registered_model_alias"),
    (MlflowClient, "set_model_version_tag"),
    (MlflowClient, "delete_registered_model_tag"),
    (promote, "write_json"),
]


@contextlib.contextmanager
def cut_before(number: int):
    """Kill the block before its write `number`, counted from 0."""
    counter = itertools.count()

    def guarded(original):
        def write(*args, **kwargs):
            if next(counter) == number:
                raise Cut
            return original(*args, **kwargs)

        return write

    with pytest.MonkeyPatch.context() as patch:
        for place, name in WRITES:
            patch.setattr(place, name, guarded(getattr(place, name)))
        with pytest.raises(Cut):
            yield


CHAMPION_NAMED = 2  # writes until the alias champion has moved


@pytest.mark.parametrize("number", range(6))
def test_the_next_call_mends_a_promotion_that_was_killed(embedded, number):
    for acceptance in (0.5, 0.6):
        embedded.add(acceptance=acceptance)
        promote.promote(embedded.config)
    embedded.add(acceptance=0.7)
    client, name = embedded.store.client, embedded.name
    named = number >= CHAMPION_NAMED
    outcomes = {
        promote.promote: ("3", "2"),
        promote.rollback: ("2", "3") if named else ("1", "2"),
        promote.show: ("3", "2") if named else ("2", "1"),
    }
    for call, expected in outcomes.items():
        with cut_before(number):
            promote.promote(embedded.config)
        call(embedded.config)
        assert embedded.aliases() == expected, call
        assert embedded.store.model_tags(name) == {}
        assert embedded.how("3") is None or named or call is promote.promote
        for alias, version in (("champion", "2"), ("previous", "1")):
            embedded.store.set_alias(name, alias, version)
        client.delete_model_version_tag(name, "3", "promotion")
        promote.show(embedded.config)
        assert embedded.aliases() == ("2", "1")


@pytest.mark.parametrize("number", range(6))
def test_the_next_call_mends_a_rollback_that_was_killed(embedded, number):
    """The version that was rolled back from is not lost, whichever alias the kill came before."""
    for acceptance in (0.5, 0.6):
        embedded.add(acceptance=acceptance)
        promote.promote(embedded.config)
    with cut_before(number):
        promote.rollback(embedded.config)
    promote.show(embedded.config)
    assert embedded.aliases() == (("1", "2") if number >= CHAMPION_NAMED else ("2", "1"))
    assert embedded.store.model_tags(embedded.name) == {}


@pytest.mark.parametrize("number", range(6))
def test_a_rollback_that_was_killed_and_is_typed_again_stands(embedded, number, capsys):
    """Only the call after that, which finds nothing to finish, takes it back."""
    for acceptance in (0.5, 0.6):
        embedded.add(acceptance=acceptance)
        promote.promote(embedded.config)
    with cut_before(number):
        promote.rollback(embedded.config)
    capsys.readouterr()
    promote.rollback(embedded.config)
    assert embedded.aliases() == ("1", "2")
    assert ("that was cut off has been completed" in capsys.readouterr().out) == (number >= CHAMPION_NAMED)
    assert embedded.how("1") == "rolled back from version 2" and embedded.store.model_tags(embedded.name) == {}
    promote.rollback(embedded.config)
    assert embedded.aliases() == ("2", "1")


@pytest.fixture(params=["artifact store down", "evidence being replaced"])
def unreadable(request, embedded, monkeypatch):
    """A function that makes the evidence of version 1 unreadable, and one that mends it."""

    def refuse(store, model_name, version, path, destination):
        raise PipelineError(
            f"{path} of {model_name} version {version} cannot be downloaded: refused", "try again later."
        )

    def tag(text: str) -> None:
        embedded.store.client.set_model_version_tag(embedded.name, "1", "evidence", text)

    if request.param == "artifact store down":
        whole = MlflowStore.download
        return (
            lambda: monkeypatch.setattr(MlflowStore, "download", refuse),
            lambda: monkeypatch.setattr(MlflowStore, "download", whole),
        )
    evidence = []

    def replace() -> None:
        evidence.append(embedded.store.version_tags(embedded.name, "1")["evidence"])
        tag("being replaced")

    return replace, lambda: tag(evidence[0])


def test_a_rollback_moves_the_aliases_where_the_evidence_cannot_be_read(embedded, unreadable, monkeypatch, capsys):
    """Until it can, no stage takes the old file for the champion's, and the same command typed again changes nothing."""
    for acceptance in (0.5, 0.6):
        embedded.add(acceptance=acceptance)
        promote.promote(embedded.config)
    break_it, mend_it = unreadable
    break_it()
    for _ in range(2):
        with pytest.raises(SystemExit) as error:
            call(["--rollback"], monkeypatch, embedded)
        assert error.value.code == 1
        printed = capsys.readouterr()
        assert f"{embedded.name} version 1 is the champion again" in printed.out
        assert "is the champion, but its figures for data/champion/metrics.json cannot be read" in printed.err
        assert "`python -m pipeline.promote --list` writes it" in printed.err
        assert embedded.store.aliases(embedded.name) == {"candidate": "2", "champion": "1", "previous": "2"}
        with pytest.raises(PipelineError, match="pipeline.promote --list` writes it anew"):
            stage.read_champion()
    mend_it()
    call(["--list"], monkeypatch, embedded)
    assert embedded.aliases() == ("1", "2") and embedded.store.model_tags(embedded.name) == {}
    assert embedded.file()["metrics"]["candidates"]["distilled"]["legal"]["acceptance_rate"]["value"] == 0.5


def test_a_file_about_the_champion_stays_while_its_evidence_cannot_be_read(embedded, unreadable):
    embedded.add(acceptance=0.5)
    promote.promote(embedded.config)
    before = embedded.file()
    unreadable[0]()
    with pytest.raises(PipelineError, match="version 1 is the champion, but its figures"):
        promote.show(embedded.config)
    assert embedded.file() == before


def test_evidence_that_is_not_whole_is_refused(embedded):
    """What a registration that was killed leaves: files of one evaluation, a tag of another."""
    version = embedded.add()
    embedded.store.client.set_model_version_tag(embedded.name, version, "evidence", "being replaced")
    with pytest.raises(PipelineError, match="not those that its tags name") as error:
        promote.promote(embedded.config)
    assert "pipeline.register" in error.value.remedy
    assert embedded.aliases() == (None, None)


def test_a_champion_without_evidence_can_be_replaced_for_a_reason(embedded):
    embedded.add(acceptance=0.5)
    promote.promote(embedded.config)
    embedded.store.client.set_model_version_tag(embedded.name, "1", "evidence", "being replaced")
    embedded.add(acceptance=0.6)
    with pytest.raises(PipelineError, match="version 1 are not those"):
        promote.promote(embedded.config)
    promote.promote(embedded.config, force="the champion's figures are lost")
    assert embedded.aliases() == ("2", "1")


def test_figures_of_another_machine_are_compared_with_a_note(embedded, capsys):
    embedded.add(acceptance=0.5)
    promote.promote(embedded.config)
    embedded.add(acceptance=0.6, processor="b")
    promote.promote(embedded.config)
    assert "compared loosely: processor 'b' against 'a'" in capsys.readouterr().out


def call(arguments: list[str], monkeypatch, registry: Registry) -> None:
    """The command as it is typed, in a project whose params.yaml names the registry."""
    values = {name: value for name, value in vars(registry.config).items()}
    (registry.root / "params.yaml").write_text(json.dumps({"registry": values}))
    monkeypatch.setattr(sys, "argv", ["promote", *arguments])
    promote.main()


def test_another_models_unknown_champion_stays_unknown(embedded, capsys):
    """Else its rules would not apply any more to the drafts of that model."""
    path = embedded.root / promote.CHAMPION_FILE
    write_json(path, *promote.UNKNOWN_CHAMPION_SCHEMA, {"model_name": "another", "version": "3"})
    before = path.read_bytes()
    promote.show(embedded.config)
    assert path.read_bytes() == before and "holds the champion of another" in capsys.readouterr().out
    embedded.add()
    promote.promote(embedded.config)
    assert read_json(path, *stage.CHAMPION_SCHEMA)["model_name"] == embedded.name


def test_an_unknown_alias_ends_in_one_line(registry, monkeypatch, capsys):
    """R04: no such model, and a model without a candidate."""
    for _ in range(2):
        with pytest.raises(SystemExit) as error:
            call([], monkeypatch, registry)
        assert error.value.code == 1
        message = capsys.readouterr().err
        assert message.startswith(f"error: {registry.name} has no version under the alias 'candidate'")
        assert "make repro" in message and message.count("\n") == 1
        registry.add()
        registry.store.client.delete_registered_model_alias(registry.name, "candidate")


def test_the_command_line(embedded, monkeypatch, capsys):
    embedded.add(acceptance=0.5)
    call([], monkeypatch, embedded)
    embedded.add(passed=False)
    call(["--force", "two words"], monkeypatch, embedded)
    assert embedded.how("2") == "forced: two words"
    call(["--rollback"], monkeypatch, embedded)
    assert embedded.aliases() == ("1", "2")
    call(["--list"], monkeypatch, embedded)
    assert "rolled back from version 2" in capsys.readouterr().out
    with pytest.raises(SystemExit) as error:
        call(["--rollback", "--force", "x"], monkeypatch, embedded)
    assert error.value.code == 2
    with pytest.raises(SystemExit) as error:
        call(["registry.no_such_key=1"], monkeypatch, embedded)
    assert error.value.code == 1 and "no_such_key" in capsys.readouterr().err


def test_an_unreachable_server_fails_in_seconds(embedded, monkeypatch, capsys):
    """R06"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{probe.getsockname()[1]}")
    began = time.monotonic()
    with pytest.raises(SystemExit) as error:
        call(["--list"], monkeypatch, embedded)
    assert error.value.code == 1 and time.monotonic() - began < 15
    assert "cannot be used" in capsys.readouterr().err


def build_draft(folder: Path) -> None:
    """A tiny bfloat16 Llama as distillation leaves it."""
    torch.manual_seed(0)
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(64)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", unk_token="w0")
    wrapped.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)).to(torch.bfloat16)
    model.generation_config.max_new_tokens = 17
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)
    facts = {"compatibility_key": KEY, "fingerprint": fingerprint_weights(folder)}
    write_json(folder / "draft.json", "domain-draft/draft", 1, {**facts, "dtype": "bfloat16"})
    (folder / "head_token_ids.json").write_text("[1, 2]")
    (folder / "config.yaml").write_text("distill:\n  epochs: 1\n")


def evaluated(root: Path, acceptance: float, passed: bool = True) -> None:
    """The files of the later stages about data/draft."""
    metrics = made_metrics(acceptance=acceptance, fingerprint=fingerprint_weights(root / "data/draft"))
    write_json(root / "data/eval/metrics.json", "domain-draft/metrics", 1, metrics)
    write_json(root / "data/eval/summary.json", "domain-draft/summary", 1, {"acceptance_rate": acceptance})
    measured = fingerprint_files([root / "data/eval/metrics.json"])
    verdict = {**made_verdict(passed), "checks": [], "metrics_fingerprint": measured}
    write_json(root / "data/gate/verdict.json", "domain-draft/verdict", 1, verdict)
    (root / "data/distill").mkdir(exist_ok=True)
    (root / "data/distill/history.csv").write_text("step,tokens,loss\n1,10,2.0\n")


def test_a_champion_of_the_server_loads_on_another_machine(root, server, request, tmp_path, tmp_path_factory):
    """R05: registered, promoted, its weights lost by the store, measured anew and promoted again; then all local files are
    gone."""
    registry, ids = registry_at(server, root, request), [5, 9, 33, 2]
    build_draft(root / "data/draft")
    weights = (root / "data/draft/model.safetensors").stat().st_size
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(root / "data/draft")(torch.tensor([ids])).logits
    evaluated(root, acceptance=0.5)
    register.run(register.Config(registry.config))
    promote.promote(registry.config)
    run_id = registry.store.client.get_model_version(registry.name, "1").run_id
    places = tmp_path_factory.getbasetemp().glob(
        f"server*/artifacts/*/{run_id}/artifacts/draft/model/model.safetensors"
    )
    (stored,) = {path.resolve() for path in places}  # pytest links to its newest folder
    stored.unlink()
    evaluated(root, acceptance=0.55)
    register.run(register.Config(registry.config))
    promote.promote(registry.config)
    assert registry.aliases() == ("1", None)
    assert registry.file()["metrics"]["candidates"]["distilled"]["legal"]["acceptance_rate"]["value"] == 0.55
    shutil.rmtree(root / "data")
    model = registry.store.download(registry.name, "1", "", tmp_path / "download")
    assert sum(path.stat().st_size for path in model.rglob("*") if path.is_file()) <= 1.2 * weights
    assert {path.name for path in (model / "model").iterdir()} >= {
        "metrics.json", "verdict.json", "README.md", "draft.json", "head_token_ids.json", "generation_config.json",
        "tokenizer.json",
    }  # fmt: skip
    loaded = load_elsewhere(server, registry.name, ["champion"], ids, tmp_path)["champion"]
    for logits in loaded["logits"]:
        assert logits.dtype == torch.bfloat16 and torch.equal(logits, expected)
    assert loaded["words"].split() == ["w5", "w9", "w33", "w2"]
    assert "message.content" in loaded["template"] and loaded["generation"] == 17
