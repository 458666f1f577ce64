"""Load registered versions as another machine would: a process of its own, elsewhere, with no network but the store's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

LOAD = """
import json, socket, sys
connect = socket.socket.connect
def guarded(self, address):
    if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(f"the network is off: {address}")
    return connect(self, address)
socket.socket.connect = guarded
import mlflow, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
uri, name, ids, out, *aliases = sys.argv[1:]
ids = json.loads(ids)
mlflow.set_tracking_uri(uri)
results = {}
for alias in aliases:
    loaded = mlflow.transformers.load_model(f"models:/{name}@{alias}", return_type="components")
    folder = mlflow.artifacts.download_artifacts(f"models:/{name}@{alias}") + "/model"
    plain = AutoModelForCausalLM.from_pretrained(folder)
    served = mlflow.pyfunc.load_model(f"models:/{name}@{alias}")
    assert isinstance(served.predict(["w3 w4"])[0], str)
    with torch.no_grad():
        loads = (loaded["model"], plain, served.get_raw_model().model)
        logits = [model(torch.tensor([ids])).logits for model in loads]
    template = AutoTokenizer.from_pretrained(folder).chat_template
    results[alias] = {"logits": logits, "words": loaded["tokenizer"].decode(ids), "template": template,
                      "generation": plain.generation_config.max_new_tokens}
torch.save(results, out)
"""


def load_elsewhere(uri: str, name: str, aliases: list[str], ids: list[int], folder: Path) -> dict[str, dict[str, Any]]:
    """alias -> what was loaded: `logits` of `ids` (by MLflow, transformers and pyfunc), `words`, `template`, `generation`."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
    out = folder / "loaded.pt"
    command = [sys.executable, "-c", LOAD, uri, name, json.dumps(ids), str(out), *aliases]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return torch.load(out)
