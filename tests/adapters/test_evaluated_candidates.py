"""Who takes part in an evaluation: siblings and the champion beside the draft; what is not to be had is skipped by name."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from hydra import compose, initialize_config_dir
from tiny_projects import build_project, fresh_registry, register

from pipeline import evaluate, stage
from pipeline.adapters.drafts import initial_draft, read_draft_facts, save_draft
from pipeline.core.artifacts import write_json
from pipeline.core.comparison import Outcome
from pipeline.core.errors import PipelineError
from pipeline.core.evaluation_settings import Sibling


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    root = tmp_path_factory.mktemp("evaluated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "PROJECT_ROOT", root)
        made = build_project(root, 272, 264, True, fresh_registry(root))
        start = made.start("pruned")
        draft = initial_draft(start, made.target, root)
        save_draft(root / "data/draft", draft, made.target, list(range(50)), start)
        yield made


def configured(project, *siblings: Sibling) -> evaluate.Config:
    with initialize_config_dir(stage.CONF_DIR, version_base="1.3"):
        config = stage.typed_config(compose("config", overrides=["experiment=smoke"]), evaluate.Config)
    settings = dataclasses.replace(config.evaluate, siblings=list(siblings))
    return dataclasses.replace(config, target=project.target.config, draft=project.start("pruned"), evaluate=settings)


def taking_part(project, *siblings: Sibling):
    config = configured(project, *siblings)
    made = read_draft_facts(project.root / "data/draft")
    return evaluate.contestants(config, project.target, made, "legal", stage.read_champion())


def promoted(project, **changes) -> None:
    """What promotion leaves about the only registered version."""
    version = project.store.version_by_alias(project.champion, "champion")
    fingerprint = project.store.version_fingerprint(project.champion, version)
    facts = {
        "compatibility_key": project.target.compatibility_key,
        "model_name": project.champion,
        "version": version,
        "fingerprint": fingerprint,
        "tracking_uri": project.store.uri,
        "metrics": {"settings": {"draft_length": 4}},
        "domain": "legal",
    }
    path = project.root / "data/champion/metrics.json"
    path.parent.mkdir(exist_ok=True)
    write_json(path, "domain-draft/champion", 1, {**facts, **changes})


def test_a_sibling_drafts_with_its_whole_head_and_a_missing_one_is_named(project):
    found = taking_part(project, Sibling("small", "models/sibling"), Sibling("gone", "models/gone"))
    assert list(found.drafts) == ["small", "undistilled", "distilled"]
    assert found.drafts["small"].token_ids == list(range(259)) and found.drafts["distilled"].token_ids == list(
        range(50)
    )
    assert set(found.skipped) == {"gone", "champion"} and "models/gone" in found.skipped["gone"]
    assert found.skipped["champion"] == "no draft was promoted yet"


def test_the_champion_takes_part_unless_it_is_this_draft_or_out_of_reach(project):
    promoted(project)
    found = taking_part(project)
    assert list(found.drafts) == ["undistilled", "distilled", "champion"]
    assert found.skipped == {"siblings": "none are named in evaluate.siblings"}
    assert found.drafts["champion"].token_ids == [0, 2, 5] and found.drafts["champion"].draft_length == 4
    own = read_draft_facts(project.root / "data/draft")["fingerprint"]
    promoted(project, fingerprint=own)
    assert taking_part(project).skipped["champion"] == "the champion is this very draft"
    promoted(project, compatibility_key={**project.target.compatibility_key, "target": "another"})
    assert taking_part(project).skipped["champion"] == "the champion drafts for another target"
    promoted(project, domain="contracts")
    assert taking_part(project).skipped["champion"] == "the champion drafts for the domain contracts"
    assert not taking_part(project).comparable
    for unreachable in ({"version": "99"}, {"tracking_uri": "http://127.0.0.1:9"}):
        promoted(project, **unreachable)
        found = taking_part(project)
        assert found.comparable, "it is another draft for the same target, and its absence a fault"
        assert ("models:/" if "version" in unreachable else "127.0.0.1:9") in found.skipped["champion"]
    (project.root / "data/champion/metrics.json").unlink()


def test_all_drafts_are_of_the_saved_dtype(project):
    found = taking_part(project, Sibling("small", "models/sibling"))
    assert {draft.model.dtype for draft in found.drafts.values()} == {torch.float32}


def test_a_champion_of_another_template_is_no_champion_to_compare_with(project, monkeypatch):
    """The gate's rules against the champion then do not apply, instead of failing every draft from now on."""
    with monkeypatch.context() as patch:
        patch.setattr(project.target, "template", "0123456789abcdef")
        register(project, initial_draft(project.start("pretrained"), project.target, project.root))
    promoted(project)
    found = taking_part(project)
    assert found.skipped["champion"] == "the champion was distilled under another chat template"
    assert not found.comparable
    (project.root / "data/champion/metrics.json").unlink()


def test_a_champion_that_changes_meanwhile_ends_the_evaluation(project, monkeypatch):
    """What was measured beside another champion, or none, is not written."""
    shutil.copytree(project.root / "data/answers/dev", project.root / "data/answers/golden")

    def measured(*_):
        promoted(project)
        return Outcome({}, [])

    monkeypatch.setattr(evaluate, "evaluate", measured)
    with pytest.raises(PipelineError, match="Another draft became champion"):
        evaluate.run(configured(project))
    assert not (project.root / "data/eval").exists()
    (project.root / "data/champion/metrics.json").unlink()
