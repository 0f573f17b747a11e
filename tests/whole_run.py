"""Every stage of a profile from its first run to its last, with a tiny model in the real one's
place: ``python whole_run.py PROFILE``, in a folder that it may fill."""

import sys
from pathlib import Path

# First: Unsloth patches what is imported after it.
from sage_lib.training import rehearsal

# isort: split

from sage_lib.experiment.runs import load_profile
from sage_lib.pipeline import stages

profile = rehearsal.stand_in(load_profile(sys.argv[1]), Path.cwd())
for stage in stages.STAGES.values():
    for run in stage.runs(profile):
        stages._make(profile, stage, run)
