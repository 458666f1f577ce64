"""The target answers prompts at full batch, and its probabilities are kept from the same passes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedModel

from pipeline.core.answers import Answer
from pipeline.core.decoding import DecodeConfig, Decoder, GeneratedSequence
from pipeline.core.sampling import Sampling, row_seed


@dataclass
class EncodedPrompt:
    """A prompt row as the target sees it."""

    prompt_id: str
    domain: str
    task: str
    cluster: str
    token_ids: list[int]


def prompt_seed(seed: int, prompt_id: str) -> int:
    """The seed of one prompt's answer: independent of the other prompts and of what was answered before."""
    return row_seed(seed, int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:6], "big"))


def generate_answers(
    target: PreTrainedModel, prompts: list[EncodedPrompt], config: DecodeConfig, slots: int, seed: int, progress: tqdm
) -> Iterator[Answer]:
    """Decode plainly, longest prompts first, `slots` rows at a time; yields answers as they finish.

    `config.return_logprobs` and `config.prompt_logprobs`, equal, set how many alternatives are stored per token.
    `progress` counts tokens.
    """
    decoder = Decoder(target, None, config, slots=min(slots, max(1, len(prompts))))
    requests: dict[int, tuple[EncodedPrompt, int]] = {}
    for prompt in sorted(prompts, key=lambda item: (-len(item.token_ids), item.prompt_id)):
        own_seed = prompt_seed(seed, prompt.prompt_id)
        requests[decoder.submit(prompt.token_ids, own_seed)] = prompt, own_seed
    while decoder.busy:
        events = decoder.step()
        progress.update(sum(len(event.token_ids) for event in events))
        for event in events:
            if event.finished:
                prompt, own_seed = requests.pop(event.request)
                yield _answer(prompt, event.finished, config.sampling, own_seed)


def _answer(prompt: EncodedPrompt, sequence: GeneratedSequence, sampling: Sampling, seed: int) -> Answer:
    width = len(sequence.logprobs.top_ids[0])
    return Answer(
        prompt_id=prompt.prompt_id,
        domain=prompt.domain,
        task=prompt.task,
        cluster=prompt.cluster,
        prompt_ids=np.asarray(prompt.token_ids, dtype=np.int32),
        answer_ids=np.asarray(sequence.token_ids, dtype=np.int32),
        finish_reason=sequence.finish_reason,
        sampling=sampling,
        seed=seed,
        logprobs=np.asarray(sequence.logprobs.token, dtype=np.float32),
        top_ids=np.asarray(sequence.logprobs.top_ids, dtype=np.int32),
        top_logprobs=np.asarray(sequence.logprobs.top, dtype=np.float32),
        prompt_top_ids=np.asarray(sequence.prompt_logprobs.top_ids, dtype=np.int32).reshape(-1, width),
        prompt_top_logprobs=np.asarray(sequence.prompt_logprobs.top, dtype=np.float32).reshape(-1, width),
    )
