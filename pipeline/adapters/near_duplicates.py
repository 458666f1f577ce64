"""Clusters of near-duplicate documents: MinHash candidates from datasketch, each checked by its exact similarity."""

from __future__ import annotations

import numpy as np
from tqdm import tqdm

from pipeline.core.errors import PipelineError
from pipeline.core.prompts import ngram_hashes

SHINGLE_WORDS = 5
PERMUTATIONS = 128
RECALL_WEIGHTS = (0.1, 0.9)  # of false positives and false negatives: the exact check removes the former


def jaccard(left: np.ndarray, right: np.ndarray) -> float:
    """|intersection| / |union| of two sorted arrays of distinct hashes `[ngrams]`."""
    shared = len(np.intersect1d(left, right, assume_unique=True))
    return shared / (len(left) + len(right) - shared)


def cluster_documents(texts: dict[str, str], similarity: float) -> dict[str, str]:
    """Map each document id to its cluster, named by the smallest id in it.

    Two documents share a cluster if the Jaccard similarity of their word 5-grams is at least `similarity` (0 to 1), or
    if a chain of such documents links them. Case, spacing and punctuation do not count.
    """
    from datasketch import MinHash, MinHashLSH

    if not 0 < similarity <= 1:
        raise PipelineError(f"domain.near_duplicate_similarity is {similarity}.", "choose a value in (0, 1].")
    index = MinHashLSH(threshold=similarity, num_perm=PERMUTATIONS, weights=RECALL_WEIGHTS)
    empty = MinHash(num_perm=PERMUTATIONS, hashfunc=int)
    shingles: dict[str, np.ndarray] = {}
    parents: dict[str, str] = {}

    def root(name: str) -> str:
        while parents[name] != name:
            parents[name] = parents[parents[name]]
            name = parents[name]
        return name

    for name in tqdm(sorted(texts), desc="near-duplicates", unit="document", delay=3, leave=False):
        parents[name] = name
        shingles[name] = ngram_hashes(texts[name], SHINGLE_WORDS)
        signature = empty.copy()
        signature.update_batch((shingles[name] & np.uint64(0xFFFFFFFF)).tolist())
        for candidate in sorted(index.query(signature)):
            first, second = sorted((root(name), root(candidate)))
            if first != second and jaccard(shingles[name], shingles[candidate]) >= similarity:
                parents[second] = first
        index.insert(name, signature, check_duplication=False)
    return {name: root(name) for name in parents}
