import random

import pytest

from pipeline.adapters.near_duplicates import cluster_documents
from pipeline.core.errors import PipelineError


def text(seed: int, words: int = 120) -> list[str]:
    draw = random.Random(seed)
    return [f"w{draw.randrange(5000)}" for _ in range(words)]


def test_the_same_text_in_other_spacing_and_case_shares_a_cluster():
    texts = {f"made/{number}": " ".join(text(number)) for number in range(30)}
    texts["other/1"] = "\n\n".join(text(7)).upper()
    texts["short/1"], texts["short/2"] = "Yes, please", "yes   please"
    clusters = cluster_documents(texts, 0.6)
    assert clusters["other/1"] == clusters["made/7"] == "made/7"
    assert clusters["short/2"] == "short/1"
    assert len(set(clusters.values())) == 31


def test_similarity_is_exact_at_the_threshold():
    base = text(1, 200)
    near, far = [*base[:180], *text(2, 20)], [*base[:100], *text(3, 100)]
    clusters = cluster_documents({"a": " ".join(base), "b": " ".join(near), "c": " ".join(far)}, 0.6)
    assert clusters == {"a": "a", "b": "a", "c": "c"}


def test_chains_join():
    base = text(1, 200)
    step = [*base[40:], *text(2, 40)]
    last = [*step[40:], *text(3, 40)]
    texts = {"z": " ".join(base), "m": " ".join(step), "a": " ".join(last)}
    assert set(cluster_documents(texts, 0.6).values()) == {"a"}


def test_an_impossible_similarity_is_refused():
    with pytest.raises(PipelineError, match="near_duplicate_similarity"):
        cluster_documents({"a": "text"}, 0.0)
