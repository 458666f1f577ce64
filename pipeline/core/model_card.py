"""What a model version says about itself: its tags and its card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.core.gating import verdict_lines
from pipeline.core.promotion import figure


@dataclass(frozen=True)
class Evidence:
    """What the stages left about a draft, as documents."""

    draft: dict[str, Any]  # domain-draft/draft
    metrics: dict[str, Any]  # domain-draft/metrics
    summary: dict[str, Any]  # domain-draft/summary
    verdict: dict[str, Any]  # domain-draft/verdict

    @property
    def figures(self) -> dict[str, Any]:
        """The summary without its schema."""
        return {name: value for name, value in self.summary.items() if name not in ("schema", "schema_version")}

    @property
    def numbers(self) -> dict[str, float]:
        """Those of the figures that are numbers."""
        return {name: value for name, value in self.figures.items() if isinstance(value, int | float)}

    @property
    def outcome(self) -> str:
        return "passed" if self.verdict["passed"] else "failed"


def identity_tags(evidence: Evidence) -> dict[str, Any]:
    """What the draft is, whom it is for and what its gate said."""
    key = {f"compatibility.{name}": value for name, value in evidence.draft["compatibility_key"].items()}
    return {
        **key,
        "fingerprint": evidence.draft["fingerprint"],
        "target": evidence.metrics["target"]["id"],
        "target_revision": evidence.metrics["target"]["revision"] or "",
        "domain": evidence.metrics["domain"],
        "draft_length": evidence.metrics["settings"]["draft_length"],
        "gate": evidence.verdict["gate"],
        "verdict": evidence.outcome,
    }


def headline_tags(evidence: Evidence) -> dict[str, str]:
    """What tells the versions of a model apart at a glance, in the target domain."""
    acceptance, speedup, agreement = (
        figure(evidence.metrics, name) for name in ("acceptance_rate", "speedup", "token_acceptance_trimmed_head")
    )
    lower, upper = speedup["interval"] or (None, None)
    numbers = {
        "acceptance_rate": acceptance["value"],
        "token_acceptance": agreement["value"],
        "speedup": speedup["value"],
        "speedup_lower": lower,
        "speedup_upper": upper,
    }
    texts = {name: "not measured" if value is None else f"{value:.4g}" for name, value in numbers.items()}
    return {**texts, "dtype": evidence.draft["dtype"]}


def model_card(model_name: str, evidence: Evidence) -> str:
    """Markdown with a YAML head: what the draft is for, what was measured, how to load it."""
    target, settings = evidence.metrics["target"], evidence.metrics["settings"]
    rows = "\n".join(f"| {name} | {value} |" for name, value in evidence.figures.items())
    key = "\n".join(f"- {name}: {value}" for name, value in evidence.draft["compatibility_key"].items())
    verdict = "\n".join(f"- {line}" for line in verdict_lines(evidence.verdict))
    return f"""---
library_name: transformers
tags: [speculative-decoding, draft-model]
---
# {model_name}

A draft model for speculative decoding in the domain {evidence.metrics["domain"]!r}. It is valid for one target only,
{target["id"]} (revision {target["revision"] or "as installed"}):

{key}

Load it with `AutoModelForCausalLM.from_pretrained` on this folder ({evidence.draft["dtype"]}).
`head_token_ids.json` lists the token ids of its trimmed head. The licences of the target and of the prompts apply.

## Measured at draft length {settings["draft_length"]}, temperature {settings["temperature"]}

| metric | value |
| --- | --- |
{rows}

## Gate {evidence.verdict["gate"]!r}

{verdict}

Definitions and intervals: `metrics.json`, `verdict.json`.
"""
