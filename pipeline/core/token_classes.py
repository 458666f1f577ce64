"""Kinds of tokens by their text, for reading where a draft guesses well."""

from __future__ import annotations


def token_class(text: str, special: bool = False) -> str:
    """special | whitespace | number | punctuation | word start | word rest: what `text`, one decoded token, consists of."""
    if special:
        return "special"
    visible = text.strip()
    if not visible:
        return "whitespace"
    if not any(character.isalnum() for character in visible):
        return "punctuation"
    if any(character.isdigit() for character in visible):
        return "number"
    return "word start" if text[0].isspace() else "word rest"
