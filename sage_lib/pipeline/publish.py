"""A user's finished results become the published ones of their profile; weights stay behind."""

import argparse
import shutil

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment import results, runs
from sage_lib.experiment.profile import YAML_ENDINGS, Profile
from sage_lib.files import locked, write_json
from sage_lib.pipeline import arguments, figures


def publish(profile: Profile, finished: bool = False) -> dict[str, int]:
    """Put the results of a profile's runs into data/published/<name>; bytes by file name.

    The folder is replaced at once, and publishing again changes nothing. One process publishes a
    profile at a time, and first puts right what a killed one left. SageError for a run that is not
    done from today's settings, and for a profile that is a user's own file. With `finished` only
    runs that are done are taken, and published ones that are not here stay.
    """
    if profile.spec.split("+")[0].endswith(YAML_ENDINGS):
        raise SageError(
            f"profile {profile.name} is a file of your own, which nobody else could load: put it "
            "into sage_lib/experiment/profiles, and its results can be published"
        )
    target = paths.measured(profile.name, published=True)
    work = target.with_name(f".{profile.name}")  # on the same disk, and git ignores it
    new, old = work / "new", work / "old"
    with locked(work / "lock", wait=True):
        if old.is_dir() and not target.is_dir():  # killed between the two renames below
            old.rename(target)
        for folder in (new, old):
            shutil.rmtree(folder, ignore_errors=True)
        _require_done(profile, finished)
        done = {run.measured for run in runs.every_run(profile) if run.done()}
        if not done and not target.is_dir():
            raise SageError(f"no run of {profile.name} is done: there is nothing to publish")
        frames = results.collect(profile, done)
        if finished and target.is_dir():
            frames = results.joined(frames, results.Results(profile, own=False))
            for old_file in target.glob("*.json"):  # documents, which those of today replace
                new.mkdir(parents=True, exist_ok=True)
                shutil.copy2(old_file, new)
        results.write(frames, profile, new, done)
        write_json(new / "profile.json", {"spec": profile.spec, "command": runs.command(profile)})
        _require_done(profile, finished)  # no run began anew while they were read
        if target.is_dir():
            target.rename(old)
        new.rename(target)
        shutil.rmtree(old, ignore_errors=True)
        return {path.name: path.stat().st_size for path in sorted(target.iterdir())}


def _require_done(profile: Profile, finished: bool) -> None:
    """Raise SageError for a run that is not done, unless ``finished`` ones are enough."""
    planned = runs.every_run(profile)
    unfinished_runs = [run for run in planned if not run.done()]
    if unfinished_runs and not finished:
        raise SageError(
            f"{len(unfinished_runs)} of {len(planned)} runs of {profile.name} are not finished, "
            f"{unfinished_runs[0].name} first: {runs.command(profile, unfinished_runs[0])} does it"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_profile(parser)
    about = "what is done, beside the published"
    parser.add_argument("--finished", action="store_true", help=about)


def run_publish(options: argparse.Namespace) -> None:
    """Publish, and draw figures and tables from what was published."""
    profile = arguments.named_profile(options)
    sizes = publish(profile, options.finished)
    print(f"{sum(sizes.values()):,} bytes in data/published/{profile.name}:", *sizes, flush=True)
    figures.draw(None, [profile.spec])
