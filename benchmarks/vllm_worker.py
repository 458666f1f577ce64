"""Decodes prompts with vLLM: prompt ids as a line of JSON in, a timed run as a line of JSON out.

Started by benchmarks/decoder.py under vLLM's own Python, so it imports nothing of this project. The one argument is JSON:
new_tokens and, as `vllm.LLM` takes them, model, dtype, max_model_len, enforce_eager and perhaps speculative_config. The
first line out names vLLM's version.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout, which is for answers alone

    import vllm

    new_tokens = settings.pop("new_tokens")
    model = vllm.LLM(**settings, max_num_seqs=1, enable_prefix_caching=False, disable_log_stats=False)
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        prompt = {"prompt_token_ids": json.loads(line)}
        started = time.perf_counter()
        output = model.generate(prompt, sampling, use_tqdm=False)[0]
        seconds = time.perf_counter() - started
        decode = output.metrics.last_token_ts - output.metrics.first_token_ts
        token_ids = list(output.outputs[0].token_ids)
        run = {"token_ids": token_ids, "seconds": seconds, "first_seconds": seconds - decode, "first_tokens": 1}
        print(json.dumps(run), file=answers, flush=True)


if __name__ == "__main__":
    main()
