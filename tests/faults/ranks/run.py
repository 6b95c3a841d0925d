"""Kills jobs of several ranks at random: one rank, all, or the launcher, by SIGKILL or SIGSTOP; ``make ranks-kills``.

After each kill the newest checkpoint that any rank knew of must be whole, or a newer one, and of one iteration on all
ranks. Each job is started again until it ends, and must end with the bits of a job that was never killed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from checkflow.runtime.format import codec
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.reader import open_checkpoint
from tests.support.rank_jobs import RankJob, rank_job, run_job

KINDS = {"ddp": 2, "fsdp": 3, "tp": 2, "hsdp": 4}
WAYS = ("one", "one stopped", "all", "launcher")
EPOCHS, MOST_KILLS, PAUSE_SECONDS = 8, 4, 0.03


class LostError(AssertionError):
    """Something that must hold after a kill does not."""


def check(directory: Path, known: int) -> int:
    """The newest checkpoint is whole, not older than ``known``, and of one iteration on all ranks; returns its step."""
    paths = find(directory)
    if not paths:
        if known:
            raise LostError(f"step {known} was acknowledged, and there is no checkpoint")
        return 0
    with open_checkpoint(paths[0]) as checkpoint:
        checkpoint.verify()
        world_size = checkpoint.manifest.world_size
        extras = [checkpoint.extra_bytes, *(checkpoint.rank_extra_bytes(rank) for rank in range(1, world_size))]
        steps = [codec.decode(extra)["iteration"] for extra in extras if extra is not None]
        if steps != [checkpoint.step] * world_size:
            raise LostError(f"{paths[0]} is of steps {steps}")
        if checkpoint.step < known:
            raise LostError(f"step {known} was acknowledged, and step {checkpoint.step} is the newest")
        return checkpoint.step


def kill(job: RankJob, way: str, draw: random.Random) -> None:
    """Kill a job that trains, and wait until nothing of it is alive."""
    pids = job.pids()
    victim = draw.choice(pids)
    if way == "one":
        os.kill(victim, signal.SIGKILL)
        job.launcher.wait()  # it ends the others
    elif way == "one stopped":
        os.kill(victim, signal.SIGSTOP)
        time.sleep(draw.uniform(0.5, 2))
    elif way == "launcher":
        job.launcher.kill()
        time.sleep(draw.uniform(0, 1))
    job.kill_all()


def known_of(job: RankJob) -> int:
    """The newest checkpoint that a rank knew to be on storage."""
    return max((line.get("durable") or 0 for rank in range(job.ranks) for line in job.said(rank)), default=0)


def rounds(kills: int, seed: int, folder: Path) -> Counter[str]:
    """Kill jobs of each kind in turn; returns how many kills were of which way."""
    draw, done = random.Random(seed), Counter[str]()
    wholes: dict[str, str] = {}
    number = 0
    while sum(done.values()) < kills:
        kind = list(KINDS)[number % len(KINDS)]
        ranks, number = KINDS[kind], number + 1
        if kind not in wholes:
            whole = run_job(folder / f"whole-{kind}", ranks, folder / f"all-{kind}", kind, EPOCHS, every=1000)
            wholes[kind] = whole.last(0, "ended")["digest"]
        directory, newest = folder / f"checkpoints-{number}", 0
        for kill_number in range(min(MOST_KILLS, kills - sum(done.values()))):
            way, every = draw.choice(WAYS), draw.choice(("1", "2", "0.1s"))
            run = folder / f"job-{number}-{kill_number}"
            with rank_job(run, ranks, directory, kind, EPOCHS, pause=PAUSE_SECONDS, every=every) as job:
                job.reach(newest + 1)
                time.sleep(draw.uniform(0, 0.5))
                kill(job, way, draw)
                newest = check(directory, max(newest, known_of(job)))
                done[way] += 1
                say(f"{kind}, {ranks} ranks, every={every}: {way}, step {newest} is whole")
                if job.said(0, "ended"):
                    break
        last = run_job(folder / f"last-{number}", ranks, directory, kind, EPOCHS).last(0, "ended")
        if last["digest"] != wholes[kind]:
            raise LostError(f"{kind}: the job that was killed ended otherwise than one that was not")
    return done


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args(argv)
    say(f"seed {asked.seed}")
    with tempfile.TemporaryDirectory(prefix="rank-kills-") as folder:
        try:
            done = rounds(asked.kills, asked.seed, Path(folder))
        except LostError as error:
            sys.stderr.write(f"lost: {error}\n")
            return 1
    say(f"{sum(done.values())} kills lost nothing: {', '.join(f'{count} of {way}' for way, count in done.items())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
