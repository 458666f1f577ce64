"""Both GPU benchmarks run in turn within one budget, whatever becomes of the first."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
from script import load

gpu_all = load("gpu_all")


@pytest.fixture
def runs(monkeypatch):
    """The commands and limits that `main` asked for; the headline's process ends as the test wants."""
    calls, ends = [], {}

    def run(command, timeout, check):
        name = next(part.split("/")[-1] for part in command if part.endswith(".py"))
        calls.append((name, command, timeout))
        if ends.get(name) == "late":
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=ends.get(name, 0))

    monkeypatch.setattr(gpu_all.subprocess, "run", run)
    return calls, ends


def test_the_budget_is_shared(runs, tmp_path):
    calls, _ = runs
    assert gpu_all.main(["--minutes", "9", "--tiny", "--device", "cpu", "--output-folder", str(tmp_path)]) == 0
    assert [name for name, *_ in calls] == ["gpu_headline.py", "gpu_decoder.py"]
    headline = calls[0][1]
    assert [timeout for *_, timeout in calls] == pytest.approx(
        [5 * 60, 9 * 60], abs=1
    )  # the second has all that is left
    assert float(headline[headline.index("--minutes") + 1]) * 60 < calls[0][2]
    for (name, command, _), script in zip(calls, ("gpu_headline", "gpu_decoder")):
        assert "--tiny" in command and str(tmp_path / f"{script}.json") in command


@pytest.mark.parametrize("end", [1, "late"])
def test_the_second_runs_whatever_becomes_of_the_first(end, runs):
    calls, ends = runs
    ends["gpu_headline.py"] = end
    assert gpu_all.main([]) == 1 and len(calls) == 2


def test_a_budget_too_small_is_refused(runs, capsys):
    with pytest.raises(SystemExit):
        gpu_all.main(["--minutes", "4"])
    assert "--minutes must exceed" in capsys.readouterr().err
