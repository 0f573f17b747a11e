"""Measured files of a profile: what they hold, and under which labels their methods are shown.

Tables and figures carry the *key* of a method ("base", "grpo", ...); :func:`labelled` puts the
labels on at the end.
"""

import pandas as pd

from sage_lib.experiment.profile import Profile

#: Columns (or the index) that hold keys of methods.
KEYS = ("method", "against")


def labelled(profile: Profile, frame: pd.DataFrame) -> pd.DataFrame:
    """The same table with labels in place of keys in the columns :data:`KEYS`, for display.

    An index of one of these names is treated alike. A value that is no key of the profile (a
    label of the papers, say) stays as it is.
    """
    labels = {method: profile.label(method) for method in ("base", *profile.methods)}
    present = [name for name in KEYS if name in frame]
    shown = frame.assign(**{name: [labels.get(v, v) for v in frame[name]] for name in present})
    return shown.rename(index=labels) if shown.index.name in KEYS else shown
