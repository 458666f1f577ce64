"""All that is measured on a GPU, in one command and one time budget: gpu_headline.py, then gpu_decoder.py.

    PYTHONPATH=. python benchmarks/gpu_all.py [--output-folder FOLDER]    # ten minutes on one large CUDA GPU

Each runs in a process of its own: whatever ends the first, the second starts with a whole device. Each writes its JSON.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from gpu_twins import HERE, parser

DECODER_MINUTES = 4.0  # kept for gpu_decoder.py, which has its own limits
START_MINUTES = 0.4  # of a process: imports and what follows the last look at the clock


def commands(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """What is run in turn, by script."""
    common = ["--device", arguments.device, "--bundle", str(arguments.bundle), *(["--tiny"] * arguments.tiny)]

    def command(name: str, *more: str) -> list[str]:
        output = ["--output", str(arguments.output_folder / f"{name}.json")] if arguments.output_folder else []
        return [sys.executable, str(HERE / f"{name}.py"), *common, *more, *output]

    headline = arguments.minutes - DECODER_MINUTES - START_MINUTES
    return {
        "gpu_headline": command("gpu_headline", "--minutes", f"{headline:.2f}"),
        "gpu_decoder": command("gpu_decoder"),
    }


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=9.5, help="time budget of both")
    options.add_argument("--output-folder", type=Path, help="for the JSON files; default: benchmarks/results")
    arguments = options.parse_args(argv)
    if arguments.minutes <= DECODER_MINUTES + START_MINUTES:
        options.error(f"--minutes must exceed {DECODER_MINUTES + START_MINUTES}")
    started = time.perf_counter()
    failed = []
    for name, command in commands(arguments).items():
        reserved = DECODER_MINUTES if name == "gpu_headline" else 0.0
        seconds = (arguments.minutes - reserved) * 60 - (time.perf_counter() - started)
        print(f"\n##### {name}.py, at most {seconds / 60:.1f} minutes", flush=True)
        try:
            ended = subprocess.run(command, timeout=seconds, check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"{name}.py was ended: the time is spent; its JSON holds the parts that were done", flush=True)
            ended = 1
        failed += [name] * bool(ended)
    print(f"\n##### {(time.perf_counter() - started) / 60:.1f} minutes in all; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
