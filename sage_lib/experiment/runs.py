"""The runs of a profile, stage by stage, and what one has to do with another."""

from __future__ import annotations

import contextlib
import functools
import itertools
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_lib import paths
from sage_lib.algorithm.guides import Guide, build_guide, needs_entropies
from sage_lib.errors import SageError
from sage_lib.experiment.profile import BASE, Profile, extended, find, load_profile, split_spec
from sage_lib.experiment.run import READ, TRACED, Run, new_run, sft_run
from sage_lib.experiment.run import put_aside as put_aside
from sage_lib.files import read_json

__all__ = ["TRACED", "Run", "load_profile", "put_aside", "sft_run"]

#: Why the stage replay refuses a backend.
NOT_WATCHED = (
    "the stage replay watches every update, and Unsloth computes its loss elsewhere: set "
    "compute.backend=trl, or exploration.seeds=0"
)


def _of(policy: Run, stage: str, alone: bool = False, profile: Profile | None = None) -> Run:
    """The run of a stage that measures the model of ``policy``, ``alone`` where there is one."""
    folder, short = ("evaluation", "eval") if stage == "evaluate" else (stage, stage)
    place = stage if alone else f"{folder}/{policy.name}"
    name = stage if alone else f"{short}-{policy.name}"
    whose = {"method": policy.method, "seed": policy.seed, "policy": policy}
    return new_run(profile or policy.profile, stage, place, name, **whose)


def entropy_run(profile: Profile) -> Run:
    """The base's token entropies on RL's prompts, from which a guide may take its threshold."""
    return _of(sft_run(profile), "entropies", alone=True)


def rl_run(profile: Profile, method: str, seed: int) -> Run:
    """The run of one method (a key of ``profile.methods``) and seed."""
    name, whose = f"{method}-s{seed}", {"method": method, "seed": seed}
    return new_run(profile, "rl", f"rl/{name}", name, policy=sft_run(profile), **whose)


def rl_runs(profile: Profile) -> list[tuple[str, int, Run]]:
    """(method, seed, run) of every RL run of the profile, seed by seed."""
    own = {method: profile.seeds_of(method) for method in profile.methods}
    seeds = dict.fromkeys([*profile.seeds, *itertools.chain(*own.values())])
    return [(m, s, rl_run(profile, m, s)) for s in seeds for m in own if s in own[m]]


def policy_runs(profile: Profile) -> list[Run]:
    """The run that makes the base, then every RL run."""
    return [sft_run(profile), *(run for _, _, run in rl_runs(profile))]


def evaluation_run(profile: Profile, policy: Run) -> Run:
    """The evaluation of the model that ``policy`` made."""
    return _of(policy, "evaluate", profile=profile)


def evaluations(profile: Profile) -> list[tuple[str, int | None, Run, Run]]:
    """(method, seed, evaluation, policy) of the base (no seed) and of every RL run that is
    evaluated."""
    chosen = [p for p in policy_runs(profile) if p.method in (BASE, *profile.evaluated)]
    return [(p.method, p.seed, evaluation_run(profile, p), p) for p in chosen]


def trace_run(profile: Profile) -> Run:
    """The token-by-token traces of the reference method's policy."""
    return _of(policy_runs(profile)[:2][-1], "trace", alone=True)


def effects_run(profile: Profile) -> Run:
    """What the branch guide adds to the expected gradient of each anchor."""
    return _of(sft_run(profile), "effects", alone=True)


def optimum_run(profile: Profile) -> Run:
    """The base's completions enumerated, and what each guide does to where eq. 4 leads."""
    return _of(sft_run(profile), "optimum", alone=True)


def explored(profile: Profile, stage: str) -> list[Run]:
    """The runs of a stage that reads policies token by token: of the methods that ``exploration``
    names (replay and impact: of the reference method) the first ``exploration.seeds`` seeds."""
    settings, reference = profile.exploration, (profile.reference,)
    named = settings.methods or reference if stage == "dynamics" else reference
    own = {method: profile.seeds_of(method) for method in named if method in profile.methods}
    policies = [rl_run(profile, m, seed) for m in own for seed in own[m][: settings.seeds]]
    return [_of(policy, stage) for policy in policies]


#: Base against trained policy on the same completions; every update watched token by token; tokens
#: replaced by their runner-up.
dynamics_runs = functools.partial(explored, stage="dynamics")
replay_runs = functools.partial(explored, stage="replay")
impact_runs = functools.partial(explored, stage="impact")


def exploration_runs(profile: Profile) -> list[Run]:
    """What notebooks 14 and 15 ask for beyond :func:`every_run`."""
    return [run for stage in READ if profile.rl for run in explored(profile, stage)]


def every_run(profile: Profile) -> list[Run]:
    """Every run that the notebooks ask for, in the order in which they build on each other."""
    found = [sft_run(profile)]
    if profile.rl:
        found += [entropy_run(profile), *policy_runs(profile)[1:], trace_run(profile)]
        if profile.exact:
            found += [optimum_run(profile), effects_run(profile)]
    return [*found, *(run for _, _, run, _ in evaluations(profile))]


def entropies(profile: Profile) -> dict[str, Any]:
    """What the stage entropies measured: tokens, mean, quantiles (nats), histogram."""
    return dict(read_json(entropy_run(profile).measured / "entropy.json"))


def guide_of(profile: Profile, choice: Mapping[str, Any]) -> Guide:
    """The guide of a choice, made from the base's entropies where it asks for them."""
    return build_guide(choice, entropies(profile)["quantiles"] if needs_entropies(choice) else None)


def require_entropies(profile: Profile, guide: Mapping[str, Any] | None) -> None:
    """SageError where a guide needs entropies that were not measured with the profile's settings,
    or not yet: an old threshold must not be taken without a word."""
    run = entropy_run(profile)
    if guide is not None and needs_entropies(guide) and not run.done():
        raise SageError(
            "the base's entropies, from which the guide takes its threshold, were not measured "
            f"with the settings of profile {profile.name}: {command(profile, run)} does it"
        )


def made_below(
    profile: Profile, run: Run, settings_alone: bool = False
) -> tuple[Profile, Run] | None:
    """The profile that a variant changes (smoke, of "smoke+rl.beta=0.2"), or that a file extends
    (paper, of paper_losses), and its base or policy that is the same as ``run`` and done.

    ``settings_alone``: whichever weights it starts from, which may not be here yet.
    """
    mark = "recipe" if settings_alone else "fingerprint"
    name, *changes = split_spec(profile.spec)
    path: Path | None = find(name, Path.cwd())
    while path is not None:
        base = path.stem if path.parent == paths.PROFILES else str(path)
        for number in reversed(range(len(changes) + 1)):
            spec = "+".join([base, *changes[:number]])
            with contextlib.suppress(SageError):  # a change of what it does not have
                whose = load_profile(spec)
                if whose.name == profile.name or not (paths.build(whose.name) / run.stage).is_dir():
                    continue
                for one in policy_runs(whose) if run.stage == "rl" else [sft_run(whose)]:
                    if getattr(one, mark) == getattr(run, mark) and one.done():
                        return whose, one
        path = extended(path)
    return None


def finished(profile: Profile, policy: Run | None) -> Run:
    """``policy``, the run whose model is read; SageError where that is not there."""
    if policy is None or not policy.done():
        raise SageError(
            f"there is no finished model of {policy.name if policy else 'a policy'} in profile "
            f"{profile.name}: {command(profile, policy)} makes it"
        )
    return policy


def command(profile: Profile, run: Run | None = None) -> str:
    """What to type to make a run of a profile, or without one everything, again."""
    spec = shlex.quote(profile.spec)
    if run is None:
        return f"sage-companion reproduce --profile {spec}"
    return f"sage-companion stage {run.stage} --profile {spec} --run {run.name}"
