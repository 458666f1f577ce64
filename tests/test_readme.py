"""Every command of the README is run, with the smoke experiment, or checked as far as it can be without a model hub."""

from __future__ import annotations

import json
import re
import shlex
import sys

import pytest
from clone import checked
from dependencies import ROOT

from pipeline.promote import parse

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.split("  #")[0].strip()
    for line in README.splitlines()
    if line.startswith("    ") and line.strip().startswith(("make ", "source ", "python ", "dvc ", "mlflow "))
]
# A remote, a server: checked below without them.
NEEDS_MORE = ("dvc remote add", "dvc push", "mlflow ui", "mlflow server", "source ")


def chosen(start: str) -> list[str]:
    return [command for command in COMMANDS if command.startswith(start) and not any(w in command for w in NEEDS_MORE)]


def test_commands_are_found_and_all_are_covered():
    covered = {*chosen("make "), *chosen("python"), *chosen("dvc")}
    assert len(covered) >= 12
    assert [c for c in COMMANDS if c not in covered and not any(words in c for words in NEEDS_MORE)] == []


@pytest.mark.parametrize("command", chosen("make "))
def test_make_commands_are_targets_and_their_overrides_compose(command, clone):
    words = shlex.split(command)
    overrides = [word for argument in words if argument.startswith("ARGS=") for word in shlex.split(argument[5:])]
    assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
    if words[1] == "promote":
        overrides = parse(overrides).overrides
    if "domain=contracts" not in overrides:
        program = "import sys; from pipeline.compose import composed; composed(sys.argv[1:])"
        checked([sys.executable, "-c", program, *overrides], clone)


@pytest.mark.parametrize("command", chosen("python"))
def test_stage_commands_run(command, clone):
    words = shlex.split(command)
    checked([*words, *([] if "experiment=smoke" in words else ["experiment=smoke"])], clone)


@pytest.mark.parametrize("command", chosen("dvc"))
def test_dvc_commands_run(command, clone):
    words = shlex.split(command)
    smoke = ["-S", "experiment=smoke"] if "exp" in words and "experiment=smoke" not in words else []
    checked([*words, *smoke], clone)


def test_a_remote_receives_the_artifacts(clone, tmp_path):
    checked([".venv/bin/dvc", "remote", "add", "-f", "-d", "store", str(tmp_path)], clone)
    checked([".venv/bin/dvc", "push"], clone)
    assert any(path.is_file() for path in tmp_path.rglob("*"))


def test_own_data_example(clone):
    text = re.search(r"    # conf/domain/contracts.yaml\n((?:    .*\n)+)", README)[1]
    (clone / "conf/domain/contracts.yaml").write_text(re.sub("^    ", "", text, flags=re.M), encoding="utf-8")
    folder = clone / "data/raw/contracts"
    folder.mkdir(parents=True, exist_ok=True)
    nouns = ["lease", "loan", "sale", "pledge", "licence", "service", "supply", "escrow", "agency", "rental"]
    with (folder / "ours.jsonl").open("w", encoding="utf-8") as stream:
        for index in range(400):
            noun = nouns[index % 10]
            words = " ".join(f"party {index * 31 + k} shall {noun} item {index * 17 + 3 * k}" for k in range(12))
            stream.write(json.dumps({"text": f"Under clause {index} the {words} in full.", "ignored": None}) + "\n")
    checked([".venv/bin/python", "-m", "pipeline.prepare", "domain=contracts"], clone)
    counts = json.loads((clone / "data/prompts/stats.json").read_text(encoding="utf-8"))["prompts"]
    assert sum(counts["golden"]["contracts"].values()) > 50


def test_serving_examples(clone):
    """The Python lines of the serving section as they stand, on the draft that the smoke run registered."""
    checked(
        [sys.executable, "-m", "pipeline.evaluate", "experiment=smoke"], clone
    )  # costs at every k, whatever ran before
    section = README[README.index("## Serving the draft") : README.index("## What the decoder guarantees")]
    lines = [line[4:] for line in section.splitlines() if line.startswith("    ") and "vllm serve" not in line]
    (target,) = (clone / ".cache/models").glob("tiny-*")
    code = "\n".join(lines).replace("smollm2-135m-legal-draft", "tiny-legal-draft").replace("TARGET", repr(str(target)))
    proof = (
        "plain = target.generate(**inputs, do_sample=False, max_new_tokens=12)\n"
        "assisted = target.generate(**inputs, do_sample=False, max_new_tokens=12, assistant_model=draft)\n"
        "assert plain.tolist() == assisted.tolist()\n"
        "for prompt, sequence in zip(prompt_ids, result.sequences):\n"
        "    expected = decode(target, None, [prompt], config).sequences[0].token_ids\n"
        "    assert sequence.token_ids == expected and sequence.text\n"
    )
    checked([sys.executable, "-c", f"{code}\n{proof}"], clone)
