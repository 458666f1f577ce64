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

DECODER_MINUTES = 4.0  # gpu_decoder.py keeps to its own limits
START_MINUTES = 0.4  # of a process: imports and what follows the last look at the clock


def commands(arguments: argparse.Namespace) -> dict[str, tuple[list[str], float]]:
    """Script -> (command, minutes after which it is ended)."""
    common = ["--device", arguments.device, "--bundle", str(arguments.bundle), *(["--tiny"] * arguments.tiny)]

    def command(name: str, *more: str) -> list[str]:
        output = ["--output", str(arguments.output_folder / f"{name}.json")] if arguments.output_folder else []
        return [sys.executable, str(HERE / f"{name}.py"), *common, *more, *output]

    headline = arguments.minutes - DECODER_MINUTES
    return {
        "gpu_headline": (command("gpu_headline", "--minutes", f"{headline - START_MINUTES:.2f}"), headline),
        "gpu_decoder": (command("gpu_decoder"), DECODER_MINUTES),
    }


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=9.5, help="time budget of both")
    options.add_argument("--output-folder", type=Path, help="for the JSON files; default: benchmarks/results")
    arguments = options.parse_args(argv)
    if arguments.minutes <= DECODER_MINUTES + START_MINUTES:
        options.error(f"--minutes must exceed {DECODER_MINUTES + START_MINUTES}, what gpu_decoder.py takes")
    failed = []
    for name, (command, minutes) in commands(arguments).items():
        started = time.perf_counter()
        print(f"\n##### {name}.py, at most {minutes:.1f} minutes", flush=True)
        try:
            ended = subprocess.run(command, timeout=minutes * 60, check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"{name}.py was ended after {minutes:.1f} minutes; its JSON holds the parts that were done")
            ended = 1
        print(f"##### {name}.py: exit {ended} after {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)
        failed += [name] * bool(ended)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
