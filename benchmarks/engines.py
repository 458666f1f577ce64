"""The decoders that benchmarks/decoder.py times: each leg takes a prompt's ids and returns one `Run`."""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from pipeline.core.decoding import DecodeConfig, Decoder
from pipeline.core.drafters import Drafter
from pipeline.core.errors import PipelineError
from pipeline.core.evaluation import time_one

VLLM_WORKER = Path(__file__).parent / "vllm_worker.py"
VLLM_CACHE_GIB = 1  # memory for the key-value cache of a vLLM process
LOG_LINES_SHOWN = 15  # of a process that ended early


@dataclass(frozen=True)
class Run:
    """One prompt decoded once; seconds count from the call.

    `first_tokens` tokens were delivered together first, after `first_seconds`. `rounds` and `emitted` count verification
    passes and the tokens they yielded; None where an engine does not tell.
    """

    token_ids: list[int]
    seconds: float
    first_seconds: float
    first_tokens: int
    rounds: int | None = None
    emitted: int | None = None

    @property
    def decode_seconds(self) -> float:
        """From the first delivery to the end of the call."""
        return self.seconds - self.first_seconds

    @property
    def decode_tokens(self) -> int:
        return len(self.token_ids) - self.first_tokens


Leg = Callable[[list[int]], Run]


def our_leg(target: PreTrainedModel, drafter: PreTrainedModel | Drafter | None, config: DecodeConfig) -> Leg:
    """This project's decoder, one prompt at a time; its caches live across calls."""
    decoder = Decoder(target, drafter, config)

    def run(prompt: list[int]) -> Run:
        timed = time_one(decoder, prompt, seed=0)
        sequence = timed.sequence
        emitted = sum(block.emitted for block in sequence.rounds)
        return Run(sequence.token_ids, timed.seconds, timed.ttft_seconds, 1, len(sequence.rounds), emitted)

    return run


class _Deliveries(BaseStreamer):
    """Notes when `generate` delivers tokens, and how many; the first delivery is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


def transformers_leg(
    target: PreTrainedModel,
    new_tokens: int,
    draft: PreTrainedModel | None = None,
    draft_length: int | None = None,
    lookup_ngram: int | None = None,
) -> Leg:
    """transformers' `generate`: plain, assisted by `draft`, or with prompt lookup (`lookup_ngram`).

    `generate` reads the assistant's draft length, its schedule and its confidence threshold from the assistant's own
    generation config: `constant` and 0 keep the length at k in every round.
    """
    lookup = {"prompt_lookup_num_tokens": draft_length, "max_matching_ngram_size": lookup_ngram} if lookup_ngram else {}
    target = _with_generation_config(target, max_new_tokens=new_tokens, **lookup)
    assistant = {}
    if draft is not None:
        fixed = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
        assistant["assistant_model"] = _with_generation_config(draft, num_assistant_tokens=draft_length, **fixed)

    def run(prompt: list[int]) -> Run:
        deliveries = _Deliveries()
        started = time.perf_counter()
        ids = torch.tensor([prompt], device=target.device)
        output = target.generate(ids, attention_mask=torch.ones_like(ids), streamer=deliveries, **assistant)
        token_ids = output[0, len(prompt) :].tolist()
        seconds = time.perf_counter() - started
        rounds = len(deliveries.counts) - 2
        emitted = sum(deliveries.counts[2:])
        return Run(token_ids, seconds, deliveries.times[1] - started, deliveries.counts[1], rounds, emitted)

    return run


def _with_generation_config(model: PreTrainedModel, **settings) -> PreTrainedModel:
    """A view of `model` that decodes greedily and knows no end-of-sequence token."""
    view = copy.copy(model)
    view.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, **settings)
    return view


class VllmProcess:
    """A vLLM engine in a process of its own, under the Python of its own virtual environment; a `Leg`.

    `engine` holds arguments of `vllm.LLM`. Without `compile` the models run as they are loaded (eager).
    """

    def __init__(
        self, python: Path, engine: dict, draft: str | None, draft_length: int, compile: bool, new_tokens: int
    ) -> None:
        settings = {**engine, "enforce_eager": not compile, "new_tokens": new_tokens}
        if draft is not None:
            speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": draft_length}
            settings["speculative_config"] = speculation
        processors = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors)),
            "VLLM_CPU_KVCACHE_SPACE": str(VLLM_CACHE_GIB),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        }
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [python, VLLM_WORKER, json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment, text=True,
        )  # fmt: skip
        self.version = self._answer()["version"]

    def __call__(self, prompt: list[int]) -> Run:
        with contextlib.suppress(BrokenPipeError):  # the missing answer says it
            print(json.dumps(prompt), file=self._process.stdin, flush=True)
        return Run(**self._answer())

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            log = self._log.read().rstrip().splitlines()[-LOG_LINES_SHOWN:]
            self.close()
            print("\n".join(log), file=sys.stderr)
            raise PipelineError(
                f"vLLM ended early: {log[-1] if log else 'without a word'}", "repair its virtual environment."
            )
        return json.loads(line)

    def close(self) -> None:
        """End the process and wait for it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


def llama_cpp_leg(file: Path, context: int, new_tokens: int) -> Leg:
    """llama.cpp on a GGUF file, plain; needs the package llama-cpp-python."""
    from llama_cpp import Llama

    threads = torch.get_num_threads()
    model = Llama(str(file), n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run(prompt: list[int]) -> Run:
        model.reset()  # else the prompt's cache would be kept from the last call
        started = time.perf_counter()
        token_ids, times = [], []
        for token in model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0):
            token_ids.append(token)
            times.append(time.perf_counter())
            if len(token_ids) == new_tokens:
                break
        return Run(token_ids, time.perf_counter() - started, times[0] - started, 1)

    return run


def packaged_gguf(model_id: str) -> Path | None:
    """The GGUF file behind a `package:<distribution>` model id."""
    if not model_id.startswith("package:"):
        return None
    files = importlib.metadata.files(model_id.removeprefix("package:")) or []
    return next((Path(file.locate()) for file in files if file.name.endswith(".gguf")), None)
