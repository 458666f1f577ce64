"""From a prompt row to the token ids that the target sees."""

from __future__ import annotations

import json

from transformers import PreTrainedTokenizerBase

from pipeline.core.artifacts import fingerprint
from pipeline.core.errors import PipelineError

_PROBE = [{"role": "user", "content": "probe"}]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str | None, messages: str | None) -> list[int]:
    """Ids of a document continuation (`text`) or of a chat (`messages`, JSON), with the target's template."""
    if messages is None:
        return tokenizer(text).input_ids
    chat = json.loads(messages)
    if not chat or chat[-1]["role"] == "assistant":
        raise ValueError("the last message must not be the assistant's")
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)


def encode_prompts(tokenizer: PreTrainedTokenizerBase, rows: list[dict], max_tokens: int | None) -> list[list[int]]:
    """Encode all rows before anything expensive starts.

    `max_tokens`: the longest prompt that leaves room for the answer; None: no limit. Raises `PipelineError` listing the
    rows that the template refuses or that are empty or too long.
    """
    if any(row["messages"] is not None for row in rows) and not tokenizer.chat_template:
        raise PipelineError(
            "The prompts contain chats, but the target's tokenizer has no chat template.",
            "set domain.instruction_share=0 and give `text` prompts only, or choose an instruction-tuned target.",
        )
    encoded, refused = [], []
    for number, row in enumerate(rows):
        try:
            ids = encode_prompt(tokenizer, row["text"], row["messages"])
            if not ids:
                raise ValueError("no tokens")
            if max_tokens is not None and len(ids) > max_tokens:
                raise ValueError(f"{len(ids)} tokens, at most {max_tokens} fit")
            encoded.append(ids)
        except Exception as error:  # a template may raise anything
            refused.append(f"row {number} ({row['prompt_id']}): {' '.join(str(error).split())}")
    if refused:
        shown = "; ".join(refused[:5]) + (f"; and {len(refused) - 5} more" if len(refused) > 5 else "")
        raise PipelineError(f"{len(refused)} prompts cannot be encoded: {shown}.", "correct or remove these rows.")
    return encoded


def template_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Identifies what the chat template makes of a message; "none" without a template."""
    if not tokenizer.chat_template:
        return "none"
    try:
        return fingerprint(tokenizer.apply_chat_template(_PROBE, add_generation_prompt=True, tokenize=False))
    except Exception:  # a template that refuses the probe is still identified by its source
        return fingerprint(tokenizer.chat_template)
