"""What benchmarks/decoder.py is held to, and its tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """A ratio with the value it must reach and the one it aims for; `at_most` turns both round."""

    meaning: str
    must: float
    aim: float | None
    at_most: bool = False


TARGETS = {
    "plain": Goal("our plain / transformers plain, tokens per second", 1.2, 1.7),
    "vllm": Goal("our speculative / vLLM speculative, same draft and k", 1.0, 1.4),
    "assisted": Goal("our speculative / transformers assisted, same draft and k", 1.4, 2.0),
    "prediction": Goal("measured speedup / predicted speedup (measured-cost)", 0.93, 0.98),
    "batch": Goal("plain, batched / one by one, total tokens per second", 4.0, 6.0),
    "context": Goal("speculative round, long context / short context, time", 1.4, 1.15, at_most=True),
    "adaptive": Goal("adaptive k / best fixed k on the mixed set, tokens per second", 0.97, None),
}


VERDICTS = {"aim": "met, the aim too", "must": "met", "no": "NOT MET", None: "not measured"}


def target_row(name: str, value: float | None) -> dict:
    """A goal beside what was measured; `met` is "aim", "must", "no", or None where nothing was measured."""
    goal = TARGETS[name]
    sign = -1 if goal.at_most else 1
    met = None
    if value is not None:
        reached = [bound is not None and sign * value >= sign * bound for bound in (goal.must, goal.aim)]
        met = "aim" if reached[1] else "must" if reached[0] else "no"
    return {"name": name, **vars(goal), "measured": value, "met": met}


def print_tables(result: dict) -> None:
    """All tables of one data type."""
    print(f"\n{result['dtype']}, measured {result['measured']}, k = {result['draft_length']}\n")
    _print_legs(result["legs"], result["skipped"])
    if "prompt_lookup" in result:
        print("\nprompt lookup, at the longest k, on the prompts of the sweep")
        _print_legs(result["prompt_lookup"], {})
    if "draft_lengths" in result:
        _print_predictions(result["draft_lengths"], result["costs"]["cost_ratio"])
    if "mixed" in result:
        print(f"\nmixed domains, best fixed k = {result['mixed']['best_fixed_draft_length']}")
        _print_legs(result["mixed"]["legs"], {})
    if "batches" in result:
        _print_batches(result["batches"], result["largest_paying_batch"])
    for context, milliseconds in result.get("round_ms_by_context", {}).items():
        print(f"a round at {context} tokens of context: {milliseconds:.1f} ms")
    _print_targets(result["targets"])


def _print_legs(legs: dict[str, dict], skipped: dict[str, str]) -> None:
    print(f"{'leg':34} {'tokens/s':>9} {'decode ms/token':>16} {'tokens/round':>13} {'same tokens':>12}")
    for name, leg in legs.items():
        per_round = "" if leg["tokens_per_round"] is None else f"{leg['tokens_per_round']:.2f}"
        rates = f"{leg['tokens_per_second']:9.1f} {leg['decode_ms_per_token']:16.1f}"
        print(f"{name:34} {rates} {per_round:>13} {leg['same_tokens']:12.0%}")
    for name, reason in skipped.items():
        print(f"{name:34} skipped: {reason}")


def _print_predictions(rows: list[dict], cost_ratio: float) -> None:
    print(f"\nc = {cost_ratio:.3f}; each k on the same prompts, once")
    head = ("k", "tokens/round", "v(k)", "predicted", "measured", "decode only", "measured/predicted")
    print(f"{head[0]:>2} {head[1]:>13} {head[2]:>6} {head[3]:>10} {head[4]:>9} {head[5]:>12} {head[6]:>19}")
    for row in rows:
        print(
            f"{row['draft_length']:2} {row['tokens_per_round']:13.2f} {row['verify_cost']:6.2f}"
            f" {row['predicted_speedup']:10.2f} {row['speedup']:9.2f} {row['decode_only_speedup']:12.2f}"
            f" {row['speedup_to_predicted']:19.2f}"
        )


def _print_batches(rows: list[dict], largest: dict[str, int | None]) -> None:
    head = f"\n{'batch':>5} {'plain tokens/s':>15} {'c':>6} {'v(k)':>6} {'best k':>7} {'break-even':>11}"
    print(f"{head} {'predicted':>10} {'measured':>9}")
    for row in rows:
        passes, k = row["costs"]["target_pass_seconds"], row["best_draft_length"]
        even = "never" if row["break_even_acceptance"] is None else f"{row['break_even_acceptance']:.2f}"
        print(
            f"{row['batch']:5} {row['plain_tokens_per_second']:15.1f} {row['costs']['cost_ratio']:6.3f}"
            f" {passes[str(k + 1)] / passes['1']:6.2f} {k:7} {even:>11} {row['predicted_speedup']:10.2f}"
            f" {row['speedup']:9.2f}"
        )
    print(
        f"largest batch at which speculation pays: predicted {largest['predicted_speedup']}, measured {largest['speedup']}"
    )


def _print_targets(rows: list[dict]) -> None:
    print(f"\n{'ratio':62} {'must':>8} {'aim':>8} {'measured':>9}  met")
    for row in rows:
        sign = "<=" if row["at_most"] else ">="
        must = f"{sign} {row['must']:.2f}"
        aim = "" if row["aim"] is None else f"{sign} {row['aim']:.2f}"
        measured = "" if row["measured"] is None else f"{row['measured']:.2f}"
        print(f"{row['meaning']:62} {must:>8} {aim:>8} {measured:>9}  {VERDICTS[row['met']]}")
