"""The rounds of greedy speculative decoding that follow from what a draft says on the target's own text."""

from __future__ import annotations

from collections.abc import Sequence


def greedy_rounds(agreed: Sequence[bool], draft_length: int) -> list[tuple[int, int]]:
    """(accepted, drafted) of each round of greedy speculative decoding on one answer of the target.

    `agreed`: at each of its tokens, whether the draft, given the text before it, would have said the same. The first token
    comes from the prefill, each round adds one of the target's own to those that it accepts, and of the round that ends
    the answer only what it emits is counted, as the decoder does.
    """
    rounds, position = [], 1
    while position < len(agreed):
        hits = agreed[position : position + draft_length]
        accepted = next((index for index, hit in enumerate(hits) if not hit), len(hits))
        emitted = min(accepted + 1, len(agreed) - position)
        position += emitted
        rounds.append((accepted, min(draft_length, emitted) if position == len(agreed) else draft_length))
    return rounds
