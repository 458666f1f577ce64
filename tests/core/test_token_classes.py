"""Kinds of tokens, for the notebooks."""

from __future__ import annotations

import pytest

from pipeline.core.token_classes import token_class


@pytest.mark.parametrize(
    ("text", "expected"),
    [(" shall", "word start"), ("ment", "word rest"), ("(", "punctuation"), (" 12", "number"), ("§4", "number"), ("\n\n", "whitespace"),
     ("", "whitespace"), (" —", "punctuation")],
)  # fmt: skip
def test_a_token_is_classed_by_its_text(text, expected):
    assert token_class(text) == expected
    assert token_class(text, special=True) == "special"
