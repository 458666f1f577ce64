"""Made-up evidence of drafts: what was measured, and what the gate said."""

from __future__ import annotations

from typing import Any

KEY = {"target": "builtin:tiny", "tokenizer": "0123456789abcdef", "quantization": "none"}


def entry(value: float | None, half_width: float | None = 0.02) -> dict[str, Any]:
    """A measure with an interval of `half_width` on both sides."""
    interval = None if value is None or half_width is None else [value - half_width, value + half_width]
    return {"value": value, "interval": interval, "count": 40, "reason": "too few prompts" if value is None else None}


def made_metrics(
    acceptance: float | None = 0.5,
    speedup: float | None = 1.3,
    token_acceptance: float | None = 0.6,
    k: int = 3,
    domain: str = "legal",
    key: dict[str, str] = KEY,
    half_width: float | None = 0.02,
    fingerprint: str = "ffff",
    processor: str = "a",
) -> dict[str, Any]:
    """The document of data/eval/metrics.json, without its schema."""
    measures = {
        "acceptance_rate": entry(acceptance, half_width),
        "speedup": entry(speedup, half_width),
        "token_acceptance_trimmed_head": entry(token_acceptance, half_width),
    }
    return {
        "target": {"name": "tiny", "id": "builtin:tiny", "revision": "v1"},
        "domain": domain,
        "compatibility_key": key,
        "draft_fingerprint": fingerprint,
        "settings": {"draft_length": k, "temperature": 0.0, "dtype": "float32"},
        "draft_lengths": {"distilled": k},
        "prompts": {"golden_prompts": "abcdef"},
        "candidates": {"distilled": {domain: measures}},
        "machine": {"processor": processor, "threads": 2, "accelerator": None},
    }


def made_verdict(passed: bool = True) -> dict[str, Any]:
    """The document of data/gate/verdict.json, without its schema."""
    checks = [
        {"metric": "acceptance_rate", "passed": False, "severity": "warn"},
        {"metric": "speedup", "passed": passed, "severity": "fail"},
    ]
    return {"gate": "default", "passed": passed, "checks": checks, "config": {"gate": {"name": "default"}}}
