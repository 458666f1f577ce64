"""Benchmarks are scripts, not a package: this loads one as a module."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from dependencies import ROOT


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
