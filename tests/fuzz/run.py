"""Fuzz the public API of models for as long as you like: `make fuzz ARGS="--minutes 10"`."""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from machine import run_seed  # noqa: E402  the folders above come first
from world import OPERATIONS  # noqa: E402


def main() -> int:
    """Run seeds until the time is over; 1 where one found a violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=None, help="how many at most")
    parser.add_argument("--no-shrink", action="store_true", help="leave long sequences long")
    options = parser.parse_args()
    warnings.simplefilter("error")
    # peft asks transformers by an old name
    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing", FutureWarning)
    end, number, violations = time.monotonic() + 60 * options.minutes, options.seed, 0
    last = None if options.seeds is None else options.seed + options.seeds
    # whoever stops it sees what it has done
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        while number != last and time.monotonic() < end:
            try:
                run_seed(number, shrinks=not options.no_shrink)
            except Exception:  # noqa: BLE001  whatever it is, it is a finding
                violations += 1
                print(f"--- seed {number} ---\n{traceback.format_exc()}", flush=True)
            number += 1
    for operation, count in sorted(OPERATIONS.items()):
        print(f"{count:7d}  {operation}")
    print(f"{sum(OPERATIONS.values()):7d}  operations of {number - options.seed} seeds", end=", ")
    print(f"{violations} seeds with violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
