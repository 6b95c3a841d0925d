"""Parts of ``make faults`` that are functions: ``python -m tests.faults.fault_parts WHAT SCENARIO NUMBER FOLDER``.

``calls``: every call of a scenario (:mod:`call_faults`) fails with the errno NUMBER, or kills (0). ``plans``: of what
keeps plans. ``two``: 100 pairs of faults, drawn with seed NUMBER. ``plan bits``: every bit of a plan's file.
"""

from __future__ import annotations

import errno
import json
import logging
import sys
import time
from pathlib import Path

from checkflow.core.errors import PlanError
from checkflow.core.plan import dumps, loads
from tests.faults.call_faults import (
    SCENARIOS,
    try_every_call,
    try_every_call_of_a_plan,
    try_every_short_write,
    try_many_two_faults,
)
from tests.faults.plan_faults import good_plan

PAIRS = 100


def calls(name: str, error: int, directory: Path) -> int:
    scenario = SCENARIOS[name]
    if not error:
        kills = [try_every_call(scenario, directory, None, after=after, sticky=False) for after in (False, True)]
        return sum(kills) + try_every_short_write(scenario, directory)
    return sum(
        try_every_call(scenario, directory, error, after=after, sticky=sticky)
        for after in (False, True)
        for sticky in (False, True)
    )


def kept_plans(directory: Path) -> int:
    modes = [(error, after, sticky) for error in (None, errno.EIO, errno.ENOSPC, errno.EROFS)
             for after in (False, True) for sticky in (False, True) if error is not None or not sticky]  # fmt: skip
    return sum(try_every_call_of_a_plan(directory, error, after=after, sticky=sticky) for error, after, sticky in modes)


def plan_bits() -> int:
    data = dumps(good_plan())
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            loads(bytes(changed), "plan.json")
        except PlanError as error:
            said = str(error)
        else:
            raise AssertionError(f"bit {bit} was not noticed")
        assert "\n" not in said, f"bit {bit}: {said}"
    return 8 * len(data)


def main() -> int:
    what, name, number, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    logging.getLogger("checkflow").setLevel(logging.CRITICAL)
    directory, problems, tried = folder / "checkpoints", [], 0
    begun = time.monotonic()
    try:
        if what == "calls":
            tried = calls(name, number, directory)
        elif what == "plans":
            tried = kept_plans(directory)
        elif what == "two":
            met = try_many_two_faults(directory, number, PAIRS)
            tried = PAIRS
            if met < PAIRS // 3:
                problems.append(f"both faults were met {met} times of {PAIRS}: they come too late")
        else:
            tried = plan_bits()
    except AssertionError as error:
        problems.append(f"{what} {name}: {error}")
    seconds = round(time.monotonic() - begun, 1)
    sys.stdout.write(json.dumps({"tried": tried, "seconds": seconds, "problems": problems}) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
