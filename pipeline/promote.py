"""promote: make the candidate the champion of its model, take that back, or list the versions.

Reads:  params.yaml, or conf/ with the overrides of the command line; the MLflow registry.
Writes: the registry's aliases champion and previous; data/champion/metrics.json (schema "domain-draft/champion"), the
        champion's recorded figures, for the stages that compare a draft with it.
Does:   promotes the candidate if its gate passed and it beats the champion's recorded figures (see
        `pipeline.core.promotion`), or for a stated reason. The registry decides who is champion: each call first
        finishes what a killed one left half done, and puts data/champion/metrics.json right if someone moved the alias.
        Where the champion's figures cannot be read, that file says so instead, and the stages refuse it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from rich import box
from rich.table import Table
from yaml import YAMLError

from pipeline import stage
from pipeline.compose import composed
from pipeline.core.artifacts import fingerprint_files, read_json, write_json
from pipeline.core.errors import PipelineError
from pipeline.core.promotion import CHAMPION, PREVIOUS, Recorded, comparisons, objections, other_conditions
from pipeline.register import Config, RegistryConfig
from pipeline.stage import (
    CHAMPION_FILE,
    CHAMPION_SCHEMA,
    check_writable,
    console,
    input_path,
    output_path,
    typed_config,
)

if TYPE_CHECKING:  # importing mlflow takes seconds
    from mlflow.entities.model_registry import ModelVersion

    from pipeline.adapters.mlflow_registry import MlflowStore

ROLLED_BACK = "rolled back from version"  # begins how a version became champion by a roll-back
UNKNOWN_CHAMPION_SCHEMA = ("domain-draft/unknown-champion", 1)  # of a file that every reader of the champion refuses


def promote(config: RegistryConfig, force: str | None = None) -> None:
    """Make the version under the alias `config.alias` the champion; `force` is the reason to do so in spite of all.

    Raises `PipelineError` when there is no candidate, when it may not be promoted, and when the store cannot be used.
    """
    from pipeline.adapters.mlflow_promotion import close_promotion, name_champion

    if force is not None and not force.strip():
        raise PipelineError("--force was given no reason.", "say why: it is recorded with the version.")
    name, (store, _) = config.model_name, _open(config)
    version = store.version_by_alias(name, config.alias)
    if version is None:
        raise PipelineError(
            f"{name} has no version under the alias {config.alias!r} in {store}.",
            "`make repro` registers one when its gate passes; `python -m pipeline.promote --list` shows what is there.",
        )
    if version == store.version_by_alias(name, CHAMPION):
        _write_champion(config, _mend(config, store, replace=True))  # newer figures of the same weights, if any
        print(f"{name} version {version} is the champion already")
        return
    candidate = _recorded(store, name, version)
    how = f"forced: {force}" if force is not None else _earned(candidate, _mend(config, store), name)
    name_champion(store, name, version, how)
    _write_champion(config, candidate)
    close_promotion(store, name)
    print(f"{name} version {version} is the champion ({how}), in {store}")


def rollback(config: RegistryConfig) -> None:
    """Let champion and previous change places; a second call undoes the first, unless that was cut off: then it ends it.

    The aliases move also where the artifacts of the store cannot be read. Raises `PipelineError` in that case, when they
    have moved; when there is nothing to go back to; and when the store cannot be used.
    """
    from pipeline.adapters.mlflow_promotion import name_champion

    name, (store, completed) = config.model_name, _open(config)
    champion, previous = (store.version_by_alias(name, alias) for alias in (CHAMPION, PREVIOUS))
    if completed is not None and completed.startswith(ROLLED_BACK):
        print(f"so nothing else is rolled back: {name} version {champion} is the champion again, {completed}")
        _mend(config, store, replace=True)
        return
    if champion is None or previous in (None, champion):
        lacking = CHAMPION if champion is None else f"{PREVIOUS} champion to go back to"
        raise PipelineError(
            f"{name} has no {lacking} in {store}.",
            "`python -m pipeline.promote --list` shows the versions; promote a candidate first.",
        )
    name_champion(store, name, previous, f"{ROLLED_BACK} {champion}")
    print(f"{name} version {previous} is the champion again, version {champion} the previous one, in {store}")
    _mend(config, store, replace=True)


def show(config: RegistryConfig) -> None:
    """Print all versions with aliases, verdict and figures."""
    from pipeline.adapters.mlflow_promotion import HOW_TAG

    name, (store, _) = config.model_name, _open(config)
    versions, aliases = store.versions(name), store.aliases(name)
    if versions:
        console().print(_table(name, versions, aliases))
    else:
        print(f"{name} has no versions in {store}")
    if CHAMPION in aliases:
        tags = store.version_tags(name, aliases[CHAMPION])
        print(f"champion: version {aliases[CHAMPION]} ({tags.get(HOW_TAG, 'its alias was set by hand')})")
    _mend(config, store)


def _open(config: RegistryConfig) -> tuple[MlflowStore, str | None]:
    """The store, with no promotion half done, and how the champion was named whose promotion has been completed now."""
    from pipeline.adapters.mlflow_promotion import finish_promotion
    from pipeline.adapters.mlflow_registry import MlflowStore
    from pipeline.adapters.mlflow_store import check_store, resolve_tracking_uri

    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # two small files
    uri = resolve_tracking_uri(config.tracking_uri, stage.PROJECT_ROOT)
    check_store(uri, config.timeout_seconds)
    store = MlflowStore(uri)
    completed = finish_promotion(store, config.model_name)
    if completed is not None:
        print(f"a promotion of {config.model_name} that was cut off has been completed")
    return store, completed


def _earned(candidate: Recorded, champion: Recorded | None, name: str) -> str:
    """Why the candidate may take the champion's place; raises `PipelineError` when it may not."""
    found = objections(candidate, champion)
    if found:
        raise PipelineError(
            f"{name} version {candidate.version} is not promoted: {'; '.join(found)}.",
            "evaluate a better draft; `--force REASON` promotes this one all the same and records the reason.",
        )
    passed = f"passed the gate {candidate.verdict['gate']!r}"
    if champion is None:
        return passed
    if loosely := other_conditions(candidate, champion):
        print(f"note: measured otherwise than the champion, compared loosely: {', '.join(loosely)}")
    figures = ", ".join(map(str, comparisons(candidate, champion)))
    return f"{passed}, beats version {champion.version}: {figures}"


def _recorded(store: MlflowStore, name: str, version: str) -> Recorded:
    """A version with its evidence; raises `PipelineError` when that is not whole."""
    tags = store.version_tags(name, version) or {}
    with tempfile.TemporaryDirectory() as folder:
        metrics, verdict = (
            store.download(name, version, f"model/{file}", Path(folder)) for file in ("metrics.json", "verdict.json")
        )
        if fingerprint_files([metrics, verdict]) != tags.get("evidence"):
            raise PipelineError(
                f"The metrics.json and verdict.json of {name} version {version} are not those that its tags name.",
                "its registration was cut off: run `python -m pipeline.register` with the draft's files once more.",
            )
        return Recorded(
            version,
            tags["fingerprint"],
            read_json(metrics, "domain-draft/metrics", 1),
            read_json(verdict, "domain-draft/verdict", 1),
        )


def _mend(config: RegistryConfig, store: MlflowStore, replace: bool = False) -> Recorded | None:
    """The registry's champion; data/champion/metrics.json is made to say the same, and a promotion is closed with that.

    Another model's file stays, unless it is to `replace`. Raises `PipelineError` when the champion's evidence cannot be
    read, and when the file names a version that this store never had: it may be the only copy of its figures.
    """
    from pipeline.adapters.mlflow_promotion import close_promotion

    name, path = config.model_name, output_path(CHAMPION_FILE)
    version, found = store.version_by_alias(name, CHAMPION), _read_champion(path)
    owner = found["model_name"] if found else _disowned(path)
    others = owner not in (None, name) and not replace
    try:
        champion = None if version is None else _recorded(store, name, version)
    except PipelineError as error:
        if not others:
            _disown(path, name, version, found)
        raise PipelineError(
            f"{name} version {version} is the champion, but its figures for {CHAMPION_FILE} cannot be read: {error.reason}",
            f"{error.remedy.rstrip('.')}; then `python -m pipeline.promote --list` writes it.",
        ) from error
    if others:
        print(f"{CHAMPION_FILE} holds the champion of {owner}; promoting one of {name} will replace it")
    elif champion is not None:
        said = _write_champion(config, champion, found)
        if said is not None:
            print(f"{CHAMPION_FILE} {said}")
    elif path.exists():
        if found and owner == name and store.version_fingerprint(name, found["version"]) != found["fingerprint"]:
            raise PipelineError(
                f"{CHAMPION_FILE} names {name} version {found['version']} (in {found['tracking_uri'] or 'mlflow.db'}), which"
                f" the MLflow store {store} lacks.",
                f"point MLFLOW_TRACKING_URI at the store that has it, or delete {CHAMPION_FILE} if there is none any more.",
            )
        path.unlink()
        named = "could not be read" if found is None else f"named version {found['version']}"
        print(f"{CHAMPION_FILE} {named}, the registry has no champion: removed")
    close_promotion(store, name)
    return champion


def _disown(path: Path, name: str, version: str, found: dict[str, Any] | None) -> None:
    """Put what no stage reads into the champion's file unless `found`, its present content, is about that version.

    Without a file the rules against the champion would not apply, and another version's figures are the wrong ones.
    """
    if found is None or (found["model_name"], found["version"]) != (name, version):
        write_json(path, *UNKNOWN_CHAMPION_SCHEMA, {"model_name": name, "version": version})


def _disowned(path: Path) -> str | None:
    """The model whose champion's figures could not be read when `_disown` wrote the file; None if it did not."""
    try:
        return read_json(path, *UNKNOWN_CHAMPION_SCHEMA)["model_name"]
    except PipelineError:
        return None


def _read_champion(path: Path) -> dict[str, Any] | None:
    """data/champion/metrics.json, or None when there is none that can be read."""
    if not path.exists():
        return None
    try:
        return read_json(path, *CHAMPION_SCHEMA)
    except PipelineError as error:
        print(error.reason)
        return None


def _write_champion(config: RegistryConfig, champion: Recorded, found: dict[str, Any] | None = None) -> str | None:
    """Write data/champion/metrics.json unless `found`, its present content, says the same; returns what was mended."""
    facts = _facts(config, champion)
    if found is not None and all(found.get(name) == facts[name] for name in facts if name != "metrics"):
        return None  # its figures at promotion stay: stages that depend on the file need not run again
    write_json(output_path(CHAMPION_FILE), *CHAMPION_SCHEMA, facts)
    if found is None:
        return f"was missing or could not be read: written, the champion is version {champion.version}"
    if found["model_name"] != config.model_name:
        return f"held the champion of {found['model_name']}: replaced, version {champion.version} is this model's"
    if (found["version"], found["fingerprint"]) == (champion.version, champion.fingerprint):
        return f"written anew for version {champion.version}"
    return f"named version {found['version']}, the registry's champion is version {champion.version}: written anew"


def _facts(config: RegistryConfig, champion: Recorded) -> dict[str, Any]:
    return {
        "model_name": config.model_name,
        "version": champion.version,
        "fingerprint": champion.fingerprint,
        "compatibility_key": champion.metrics["compatibility_key"],
        "domain": champion.metrics["domain"],
        "tracking_uri": config.tracking_uri,
        "metrics": champion.metrics,
    }


def _table(name: str, versions: list[ModelVersion], aliases: dict[str, str]) -> Table:
    """One row per version, the newest first."""
    table = Table(title=name, box=box.SIMPLE, title_justify="left")
    columns = (
        "version",
        "aliases",
        "gate",
        "speedup",
        "acceptance rate",
        "token acceptance",
        "k",
        "dtype",
        "registered",
    )
    for column in columns:
        table.add_column(column)
    for item in versions:
        tags, version = item.tags, str(item.version)
        date = datetime.datetime.fromtimestamp(item.creation_timestamp / 1000).date()
        figures = (tags.get(key, "") for key in ("acceptance_rate", "token_acceptance", "draft_length", "dtype"))
        named = ", ".join(sorted(alias for alias, of in aliases.items() if of == version))
        verdict = f"{tags.get('verdict', 'no')} ({tags.get('gate', 'verdict')})"
        table.add_row(version, named, verdict, _speedup(tags), *figures, str(date))
    return table


def _speedup(tags: dict[str, str]) -> str:
    value, lower, upper = (tags.get(name, "not measured") for name in ("speedup", "speedup_lower", "speedup_upper"))
    return value if lower == "not measured" else f"{value} ({lower} to {upper})"


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.promote",
        description="Make the registered candidate the champion if its gate passed and it beats the champion.",
    )
    parser.add_argument(
        "overrides", nargs="*", help="compose conf/ with these, e.g. domain=contracts (default: params.yaml)"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--force", metavar="REASON", help="promote in spite of verdict and figures, for a recorded reason"
    )
    action.add_argument("--rollback", action="store_true", help="let champion and previous champion change places")
    action.add_argument("--list", action="store_true", help="print all versions with aliases, verdict and figures")
    return parser.parse_args(arguments)


def _configured(overrides: list[str]) -> RegistryConfig:
    if overrides:
        return typed_config(OmegaConf.create(composed(overrides)), Config).registry
    try:
        cfg = OmegaConf.load(input_path("params.yaml"))
    except (OSError, YAMLError) as error:
        raise PipelineError(f"params.yaml cannot be read ({error}).", "run `make params`.") from None
    return typed_config(cfg, Config).registry


def main() -> None:
    options = parse(sys.argv[1:])
    try:
        config = _configured(options.overrides)
        check_writable(output_path(CHAMPION_FILE).parent)
        if options.list:
            show(config)
        elif options.rollback:
            rollback(config)
        else:
            promote(config, options.force)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
