"""Looking through all objects."""

from __future__ import annotations

import threading

from checkflow.planner.record.live_objects import find_objects


class Wanted:
    pass


def test_no_other_thread_runs_while_the_list_of_all_is_alive() -> None:
    wanted, stop, counts, seen = Wanted(), threading.Event(), [0], set[int]()

    def count() -> None:
        while not stop.is_set():
            counts[0] += 1

    def look(value: object) -> bool:
        seen.add(counts[0])
        return type(value) is Wanted

    thread = threading.Thread(target=count)
    thread.start()
    try:
        found = find_objects(look)
    finally:
        stop.set()
        thread.join()
    assert found == [wanted]
    assert len(seen) == 1
