"""Many simulated schedules of the council: ``python -m tests.runtime.ranks.run --schedules 100000 [--break NAME]``.

With ``--break`` a check is taken away of the council first (breaks.py), and the run must fail.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from unittest import mock

from tests.runtime.ranks.breaks import BREAKS
from tests.runtime.ranks.simulation import BrokenError, Tally, simulate

WITHOUT_FAULTS = 10  # one schedule in so many


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--break", dest="broken", choices=sorted(BREAKS))
    asked = parser.parse_args()
    tally, begun, broken = Tally(), time.monotonic(), 0
    with ExitStack() as stack:
        if asked.broken:
            stack.enter_context(mock.patch.object(*BREAKS[asked.broken][0]))
        for seed in range(asked.first, asked.first + asked.schedules):
            try:
                tally.add(simulate(seed, faults=seed % WITHOUT_FAULTS != 0))
            except BrokenError as error:
                broken += 1
                print(f"schedule {seed}: {error}", flush=True)  # noqa: T201
                if broken == 10:
                    break
            if seed % 10_000 == 9_999:
                print(f"{seed + 1} schedules, {time.monotonic() - begun:.0f} s: {tally}", flush=True)  # noqa: T201
    print(f"{broken} broken, {time.monotonic() - begun:.0f} s: {tally}")  # noqa: T201
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
