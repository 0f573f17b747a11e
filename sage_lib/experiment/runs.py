"""The stages in one table, and the runs of a profile: their names, and which run needs which."""

from __future__ import annotations

import itertools
import operator
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sage_lib import paths
from sage_lib.algorithm.guide_choices import build_guide, needs_entropies
from sage_lib.algorithm.guides import Guide
from sage_lib.errors import SageError
from sage_lib.experiment import made_from as parts
from sage_lib.experiment.profile import BASE, Method, Profile
from sage_lib.experiment.run import Run
from sage_lib.files import read_json

#: Why the stage replay refuses a backend.
NOT_WATCHED = (
    "the stage replay watches every update, and Unsloth computes its loss elsewhere: set "
    "compute.backend=trl, or exploration.seeds=0"
)


def _new_run(profile: Profile, stage: str, place: str, name: str, **more: Any) -> Run:
    """Return a run of a stage; ``place``: its folder below the profile's."""
    build, measured = paths.build(profile.name) / place, paths.measured(profile.name) / place
    row = STAGES[stage]
    return Run(profile, stage, name, build, measured, reads=row.reads, makes=row.makes, **more)


def _on(policy: Run, stage: str, alone: bool = False) -> Run:
    """Return the run of a stage that measures a policy; ``alone``: the stage has no other run."""
    short = "eval" if stage == "evaluation" else stage
    place, name = (stage, stage) if alone else (f"{stage}/{policy.name}", f"{short}-{policy.name}")
    more = {"method": policy.method, "seed": policy.seed, "policy": policy}
    return _new_run(policy.profile, stage, place, name, **more)


def sft_run(profile: Profile) -> Run:
    """Return the run that makes the base policy."""
    return _new_run(profile, "sft", "sft", "sft")


def entropy_run(profile: Profile) -> Run:
    """Return the run that measures the base's token entropies on the prompts of RL."""
    return _on(sft_run(profile), "entropies", alone=True)


def rl_run(profile: Profile, method: str, seed: int) -> Run:
    """Return the run of one method (a key of ``profile.methods``) and seed."""
    name, more = f"{method}-s{seed}", {"method": method, "seed": seed}
    earlier = tuple(first_run(profile, key) for key in profile.methods[method].policies)
    more |= {"policy": start_run(profile, profile.methods[method]), "earlier": earlier}
    return _new_run(profile, "rl", f"rl/{name}", name, **more)


def first_run(profile: Profile, method: str) -> Run:
    """Return the RL run of a method's first seed."""
    return rl_run(profile, method, profile.seeds_of(method)[0])


def start_run(profile: Profile, method: Method) -> Run:
    """Return the run whose policy RL of a method starts from."""
    return sft_run(profile) if method.start is None else first_run(profile, method.start)


def rl_runs(profile: Profile) -> list[Run]:
    """Return every RL run of the profile, seed by seed."""
    seeds_of = {method: profile.seeds_of(method) for method in profile.methods}
    seeds = dict.fromkeys([*profile.seeds, *itertools.chain(*seeds_of.values())])
    return [rl_run(profile, m, s) for s in seeds for m in seeds_of if s in seeds_of[m]]


def policy_runs(profile: Profile) -> list[Run]:
    """Return the run that makes the base, then every RL run."""
    return [sft_run(profile), *rl_runs(profile)]


def evaluation_run(policy: Run) -> Run:
    """Return the evaluation of the model that the run ``policy`` made."""
    return _on(policy, "evaluation")


def evaluations(profile: Profile) -> list[Run]:
    """Return the evaluations of the base and of every RL run that is evaluated."""
    policies = [run for run in policy_runs(profile) if run.method in (BASE, *profile.evaluated)]
    return [evaluation_run(policy) for policy in policies]


def every_run(profile: Profile) -> list[Run]:
    """Return the runs of all stages, in the order in which they build on each other."""
    return [run for stage in STAGES.values() for run in stage.runs(profile)]


@dataclass(frozen=True)
class Stage:
    """A kind of work: a row of :data:`STAGES`."""

    name: str
    about: str
    function: str  # below sage_lib; called with ``gets(run)`` and the run
    runs_in: Callable[[str, Profile], list[Run]]  # of its name and a profile
    needs: str  # stages of the base, or of the same method and seed, that come before
    reads: tuple[parts.Part, ...]  # what decides its results
    measures: str  # its files of results
    makes: str = ""  # what must lie in the build folder for a run to be done
    gets: Callable[[Run], Any] = operator.attrgetter("profile")

    def runs(self, profile: Profile) -> list[Run]:
        """Return its runs in a profile; without RL there is the base, and what samples it."""
        there = profile.rl or self.name in ("sft", "evaluation")
        return self.runs_in(self.name, profile) if there else []


def _base(stage: str, profile: Profile) -> list[Run]:
    return [_on(sft_run(profile), stage, alone=True)]


def _exact(stage: str, profile: Profile) -> list[Run]:
    """Return the run on the base, where all valid completions can be listed."""
    return _base(stage, profile) if profile.exact else []


def _first(stage: str, profile: Profile) -> list[Run]:
    """Return the run on the first policy of the first method."""
    return [_on(policy_runs(profile)[:2][-1], stage, alone=True)]


def _baseline(stage: str, profile: Profile, methods: Iterable[str] = ()) -> list[Run]:
    """Return the runs on the first ``exploration.seeds`` seeds of the first method, or of
    ``methods``."""
    names = [name for name in methods or (profile.baseline,) if name in profile.methods]
    seeds = {name: profile.seeds_of(name)[: profile.exploration.seeds] for name in names}
    return [_on(rl_run(profile, name, seed), stage) for name in names for seed in seeds[name]]


def _explored(stage: str, profile: Profile) -> list[Run]:
    """Return the runs on the methods that ``exploration`` names."""
    return _baseline(stage, profile, profile.exploration.methods or ())


_TOKENS = parts.exploration("prompts", "completions")
_REPLACED = parts.exploration("prompts", "completions", "replaced", "continuations")
# fmt: off
_ROWS = (  # name, about, function, runs_in, needs, reads, measures
    Stage("sft", "the base policy", "training.sft.train", lambda _, profile: [sft_run(profile)],
          "", (parts.base_training,), "steps.jsonl", makes="model"),
    Stage("entropies", "the base's", "evaluation.guide_traces.measure_entropies", _base,
          "sft", (parts.completions, parts.entropy_prompts), "entropy.json"),
    Stage("rl", "every method and seed", "training.rl.train",
          lambda _, profile: rl_runs(profile),
          "sft entropies", (parts.rl_training,), "steps.jsonl exact.jsonl rounds.csv",
          makes="model", gets=lambda run: run.profile.training(run.method, run.seed)),
    Stage("replay", "RL, token by token", "training.replay.replay_run", _baseline,
          "sft entropies rl", (parts.completions, parts.base), "moves.csv"),
    Stage("trace", "guides on samples", "evaluation.guide_traces.trace_guides", _first,
          "sft entropies rl", (parts.traces,), "traces.json signals.json"),
    Stage("optimum", "of the base", "evaluation.optima.measure_optimum", _exact,
          "sft entropies", (parts.optimum,), "optimum.csv"),
    Stage("effects", "on anchors", "evaluation.expected_gradients.measure_effects", _exact,
          "sft entropies", (parts.completions, parts.branch_guide), "effects.json"),
    Stage("dynamics", "base and policy", "evaluation.exploration.measure_dynamics", _explored,
          "sft entropies rl", (parts.completions, parts.base, _TOKENS), "prompts.csv tokens.csv"),
    Stage("impact", "tokens replaced", "evaluation.exploration.measure_impact", _baseline,
          "sft entropies rl", (parts.completions, parts.base, _REPLACED), "impact.csv"),
    Stage("evaluation", "samples of all", "evaluation.evaluate.evaluate_policy",
          lambda _, profile: evaluations(profile),
          "sft entropies rl", (parts.samples, parts.base),
          "counts.csv support.csv scores.csv samples.jsonl", makes="samples.jsonl"),
)
# fmt: on
#: By name, in the order in which they are made; of those that do not build on each other, the one
#: with the longest run comes first.
STAGES = {stage.name: stage for stage in _ROWS}


def entropies(profile: Profile) -> dict[str, Any]:
    """Read the measured entropies: tokens, mean, quantiles (nats), histogram."""
    return dict(read_json(entropy_run(profile).measured / "entropy.json"))


def guide_of(profile: Profile, choice: Mapping[str, Any]) -> Guide:
    """Build the guide of a choice, from the base's entropies where it needs them."""
    return build_guide(choice, entropies(profile)["quantiles"] if needs_entropies(choice) else None)


def require_entropies(profile: Profile, guide: Mapping[str, Any] | None) -> None:
    """Raise SageError where a guide needs entropies that were not measured with the profile's
    settings: an old threshold must not be taken without a word."""
    run = entropy_run(profile)
    if guide is not None and needs_entropies(guide) and not run.done():
        raise SageError(
            "the base's entropies, from which the guide takes its threshold, were not measured "
            f"with the settings of profile {profile.name}: {command(profile, run)} does it"
        )


def finished(profile: Profile, policy: Run | None) -> Run:
    """Return ``policy``, the run whose model is read; raise SageError where there is no model."""
    if policy is None or not policy.done():
        raise SageError(
            f"there is no finished model of {policy.name if policy else 'a policy'} in profile "
            f"{profile.name}: {command(profile, policy)} makes it"
        )
    return policy


def command(profile: Profile, run: Run | None = None) -> str:
    """Return the command that makes a run of a profile, or all of its runs, again."""
    spec = shlex.quote(profile.spec)
    if run is None:
        return f"sage-companion reproduce --profile {spec}"
    return f"sage-companion stage {run.stage} --profile {spec} --run {run.name}"
