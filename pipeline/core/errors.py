"""The one exception that ends a stage with a one-line reason and a remedy."""

from __future__ import annotations


class PipelineError(Exception):
    """A condition that the user can mend.

    `reason` says what is wrong, `remedy` what to do about it; `str()` joins both on one line.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason} Remedy: {remedy}")
        self.reason = reason
        self.remedy = remedy
