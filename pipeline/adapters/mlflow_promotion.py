"""The champion of a registered model: two aliases that move together, whatever stops a promotion half-way.

A promotion is first written down whole, in a tag of the registered model, then carried out; the tag is deleted when all
that says who is champion says the same. Who finds the tag finishes the promotion. A registry has no transactions, and
without the tag a kill between the aliases would lose the previous champion.
"""

from __future__ import annotations

import json

from pipeline.adapters.mlflow_registry import MlflowStore
from pipeline.adapters.mlflow_store import errors_of
from pipeline.core.promotion import CHAMPION, PREVIOUS

HOW_TAG = "promotion"  # of a version: how it became champion
UNFINISHED_TAG = "unfinished_promotion"  # of a registered model


def name_champion(store: MlflowStore, model_name: str, version: str, how: str) -> None:
    """Let the alias champion name `version`, and previous the champion before it; `how` becomes a tag of the version.

    The promotion stays written down until `close_promotion`.
    """
    planned = {CHAMPION: version, PREVIOUS: store.version_by_alias(model_name, CHAMPION), HOW_TAG: how}
    with errors_of(store.uri):
        store.client.set_registered_model_tag(model_name, UNFINISHED_TAG, json.dumps(planned))
    store.set_alias(model_name, CHAMPION, version)
    finish_promotion(store, model_name)


def finish_promotion(store: MlflowStore, model_name: str) -> str | None:
    """Do what the registry lacks of a promotion whose champion is named; returns how that became champion, None if there
    was no such promotion.

    One that was cut off before its champion was named is forgotten, for it has changed nothing yet.
    """
    mark = store.model_tags(model_name).get(UNFINISHED_TAG)
    if mark is None:
        return None
    planned = json.loads(mark)
    if store.version_by_alias(model_name, CHAMPION) != planned[CHAMPION]:
        close_promotion(store, model_name)
        return None
    if planned[PREVIOUS] is not None:
        store.set_alias(model_name, PREVIOUS, planned[PREVIOUS])
    with errors_of(store.uri):
        store.client.set_model_version_tag(model_name, planned[CHAMPION], HOW_TAG, planned[HOW_TAG])
    return planned[HOW_TAG]


def close_promotion(store: MlflowStore, model_name: str) -> None:
    """Forget the promotion that is written down, if there is one."""
    if UNFINISHED_TAG in store.model_tags(model_name):
        with errors_of(store.uri):
            store.client.delete_registered_model_tag(model_name, UNFINISHED_TAG)
