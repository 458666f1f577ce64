from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_llama

from pipeline.core.drafters import ModelDrafter, PromptLookupDrafter, with_trimmed_head
from pipeline.core.sampling import Sampling


def propose(tokens: list[int], length: int, ngram: int = 3, vocabulary=range(1000)) -> list[int]:
    drafter = PromptLookupDrafter(ngram)
    drafter.open(1, Sampling(), vocabulary)
    proposal = drafter.propose([tokens], [length], torch.zeros(1, dtype=torch.long))
    return proposal.token_ids[0, : proposal.lengths[0]].tolist()


def test_lookup_copies_after_the_last_longest_match():
    assert propose([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 2) == [8, 1]
    assert propose([5, 1, 2, 3, 7, 2, 3], 3) == [7, 2, 3]
    assert propose([1, 2, 3, 4], 3) == []
    assert propose([7, 7], 3) == [7]


def test_lookup_stops_at_tokens_that_must_not_be_emitted():
    assert propose([1, 2, 3, 50, 4, 1, 2], 4, vocabulary=range(10)) == [3]


def test_lookup_rows_may_propose_different_lengths():
    drafter = PromptLookupDrafter(2)
    drafter.open(2, Sampling(), range(100))
    proposal = drafter.propose([[1, 2, 1], [3, 4]], [3, 3], torch.zeros(2, dtype=torch.long))
    assert proposal.lengths.tolist() == [2, 0]
    assert proposal.token_ids.tolist() == [[2, 1], [0, 0]]


def test_trimmed_head_is_a_view_that_leaves_the_model_alone():
    model = tiny_llama(tie_word_embeddings=True)
    ids = torch.tensor([2, 30, 77])
    tokens = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        whole = model(tokens).logits
        assert torch.allclose(with_trimmed_head(model, ids)(tokens).logits, whole[..., ids], atol=1e-6)
        assert torch.equal(model(tokens).logits, whole)


def test_a_head_without_allowed_tokens_is_refused():
    with pytest.raises(ValueError, match="no token in common"):
        ModelDrafter(tiny_llama(), [99]).open(1, Sampling(), range(50))
