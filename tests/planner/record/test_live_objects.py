"""Looking through all objects."""

from __future__ import annotations

import threading

from checkflow.planner.record.live_objects import find_objects


class Wanted:
    pass


class Other(Wanted):
    pass


def test_exact_types_are_found() -> None:
    wanted, other = [Wanted(), Wanted()], Other()
    assert {id(one) for one in find_objects([Wanted])} == {id(one) for one in wanted}
    assert find_objects([Other]) == [other]
    assert find_objects([]) == []


def test_no_thread_fails_that_builds_a_tuple_meanwhile() -> None:
    """CPython raises SystemError there, if anybody refers to the tuple."""
    stop, errors, built = threading.Event(), list[SystemError](), [0]

    def build() -> None:
        while not stop.is_set():
            try:
                built[0] += len(tuple(number for number in range(2000)))
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    try:
        for _ in range(3):
            find_objects([Wanted])
    finally:
        stop.set()
        thread.join()
    assert built[0]
    assert errors == []
