"""Which modules of the project a module imports, directly and indirectly, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def module_file(name: str) -> Path | None:
    """The file of a `pipeline...` module, or None for a package or a name that is no module."""
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else None


def imported_modules(path: Path) -> set[Path]:
    """Project modules that `path` imports anywhere in it, functions included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {file for name in names if name.startswith("pipeline.") and (file := module_file(name))}


def closure(path: Path) -> set[Path]:
    """`path` and every project module that it needs."""
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting.extend(imported_modules(current))
    return found
