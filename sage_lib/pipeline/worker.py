"""What a worker of the runner does: a run of a stage, or a notebook."""

import json
from pathlib import Path

from sage_lib.pipeline import notebooks, processes, stages


def do(words: list[str]) -> int:
    """Do a task of :mod:`sage_lib.pipeline.runner`; returns its status."""
    kind, *rest = words
    if kind == "run":
        return stages.in_worker(*rest)
    path, output, parameters = rest
    notebooks.execute(Path(path), Path(output), json.loads(parameters))
    return 0


if __name__ == "__main__":
    processes.serve(do)
