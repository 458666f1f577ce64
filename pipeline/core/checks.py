"""Checks that build on one another: what each found, what it would take to mend it, all of them as a table."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipeline.core.errors import PipelineError
from pipeline.core.footprint import GIB


class Passed(NamedTuple):
    """What a check found that did not fail; with a `warning` it is reported as one."""

    value: Any  # for the checks that build on this one
    detail: str
    warning: str = ""
    remedy: str = ""


@dataclass
class Finding:
    check: str
    result: str  # ok | warning | failed | not run
    detail: str
    remedy: str
    value: Any = None


@dataclass
class Report:
    """Findings in the order of the checks."""

    findings: list[Finding] = dataclasses.field(default_factory=list)

    def check(self, name: str, function: Callable[..., Passed], *needs: Finding) -> Finding:
        """Note what `function` says about the values of `needs`, or that it cannot run without one of them."""
        missing = [need.check for need in needs if need.result in ("failed", "not run")]
        if missing:
            finding = Finding(name, "not run", f"needs: {', '.join(missing)}", "")
        else:
            try:
                value, detail, warning, remedy = function(*(need.value for need in needs))
            except PipelineError as error:
                finding = Finding(name, "failed", error.reason, error.remedy)
            else:
                text = "; ".join(filter(None, (detail, warning)))
                finding = Finding(name, "warning" if warning else "ok", text, remedy, value)
        self.findings.append(finding)
        return finding

    def table(self) -> str:
        """Check, result and detail of each finding, the remedy below it."""
        names = max(len(finding.check) for finding in self.findings)
        room = max(40, shutil.get_terminal_size((120, 24)).columns - names - 11)
        lines = []
        for finding in self.findings:
            texts = [finding.detail, finding.remedy and f"-> {finding.remedy}"]
            cells = [line for text in texts for line in textwrap.wrap(text, room, break_on_hyphens=False)]
            lines.append(f"{finding.check:{names}}  {finding.result:7}  {cells[0]}")
            lines += [" " * (names + 11) + cell for cell in cells[1:]]
        return "\n".join(lines)


def size_text(amount: float) -> str:
    """Bytes for reading."""
    return f"{amount / GIB:.1f} GiB" if amount >= 0.1 * GIB else f"{amount / (1 << 20):.1f} MiB"
