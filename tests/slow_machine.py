"""A verifier's worker on a machine that is ten times slower."""

import itertools
import time

from sage_lib.tasks import mathematics, verifier, worker

#: Itself, where tests put the function below in its place.
start = worker.start


def start_worker():
    """In the place of worker.start."""
    mathematics.equal = slow(mathematics.equal)
    start()


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


def verify_chunk(chunk, limit):
    """In the place of worker.verify_chunk: each pair is right and needs a second try."""
    return ["timeout" if limit < verifier.LIMIT else True] * len(chunk)
