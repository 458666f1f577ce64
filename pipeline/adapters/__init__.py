"""One heavy dependency per module, imported where it is used."""
