"""A verifier's worker on a machine that is ten times slower."""

import itertools
import time

from sage_lib.tasks import mathematics, verifier


def start_worker():
    """In the place of verifier._start_worker."""
    mathematics.equal = slow(mathematics.equal)
    verifier._start_worker()


def slow(function):
    """Spend nine times as long as a function takes, once more; but for the first call, which
    loads it."""
    calls = itertools.count()

    def slowed(*arguments):
        loaded, begun = next(calls) > 0, time.process_time()
        result = function(*arguments)
        end = time.process_time() + 9 * (time.process_time() - begun)
        while loaded and time.process_time() < end:
            pass
        return result

    return slowed
