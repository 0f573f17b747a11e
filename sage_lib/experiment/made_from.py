"""What decides the results of a run: parts of its profile, and the weights that it starts from.

Each public function returns one part of :attr:`Run.made_from`; the table :data:`runs.STAGES` says
which parts a stage reads. A part holds what the results are, not how they are shown.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sage_lib import paths
from sage_lib.algorithm.guide_choices import needs_entropies, reads_rewards
from sage_lib.experiment import problems
from sage_lib.experiment.checked import canonical, digest
from sage_lib.experiment.profile import Profile, load_profile
from sage_lib.experiment.run import Run
from sage_lib.experiment.settings import ROLLOUTS, Data, Rft
from sage_lib.files import model_hash

Part = Callable[[Run], dict[str, Any]]

#: Settings of an evaluation that decide what is drawn. The batch size does not.
_SAMPLING = ["samples", "sampled", "temperature", "top_p", "top_k", "min_p", "max_new_tokens"]
_SAMPLING += ["seed", "engine", "vllm"]
#: Settings that change when something is written, never what is learned.
_BOOKKEEPING = {"save_steps", "save_total_limit", "report_to"}
#: The guides that are traced on completions: names of algorithm.guides.GUIDES.
TRACED = ("random", "token", "branch")


def base_training(run: Run) -> dict[str, Any]:
    """Return the model before SFT, and the SFT data and settings."""
    profile, model = run.profile, run.profile.model
    if model.name != "tiny_qwen":
        model = dataclasses.replace(model, architecture=None)  # only estimates memory
    part = {"model": model, "sft": _learning(profile.sft)}
    if any(Path(model.name).glob("*.safetensors")):  # a folder, whose weights may be others now
        part["start"] = model_hash(Path(model.name))
    if not profile.sft:
        return part
    return {**part, **_training_set(profile, profile.sft_data), "lora": profile.sft_lora}


def rl_training(run: Run) -> dict[str, Any]:
    """Return the base, the RL data, and the method with its section ``rl`` or ``rft``."""
    profile, evaluation = run.profile, run.profile.evaluation
    training = profile.training(run.method, run.seed)
    method = training.method
    part = _policy(run) | _training_set(profile, profile.rl_data) | {"lora": training.lora}
    shown = [_content(data) for data in evaluation.data if not data.ood]
    part["evaluated"] = {"every": evaluation.every, "data": shown} if evaluation.every else {}
    if evaluation.every:
        part["evaluated"] |= _tempered(profile)
    if method.rft is not None:
        rounds = profile.rft_of(run.method)
        if rounds.demonstrations is not None:
            part["data"] = _content(demonstrated(profile, rounds).sft_data)
        part["rft"] = {**canonical(rounds), "sft": _learning(rounds.sft)}
        part["rollouts"] = {key: profile.rl[key] for key in ROLLOUTS}
        return {**part, "reward": method.reward, "seed": run.seed}
    part["rl"] = _learning(training.rl)
    # Labels change nothing that is learned, nor does a form of the KL where beta is 0.
    kl_form = method.kl_form if part["rl"]["beta"] else "k3"
    unlearned: dict[str, Any] = {"label": "", "family": "main", "rl": {}}
    unlearned |= {"lora": True, "seeds": None}
    part["method"] = canonical(dataclasses.replace(method, **unlearned, kl_form=kl_form))
    if "kl_form" in part["method"]:  # called anchor in published fingerprints
        part["method"]["anchor"] = part["method"].pop("kl_form")
    part["entropies"] = _entropy_digest(profile, method.guide)
    if run.earlier:
        part["policies"] = [(policy.fingerprint, policy.weights) for policy in run.earlier]
    if profile.compute.backend != "trl":  # whose loss is not TRL's to the last digit
        part["backend"] = profile.compute.backend
    return part


def completions(run: Run) -> dict[str, Any]:
    """Return the policy, the problems of RL, and how RL draws completions of them."""
    return _policy(run) | _training_set(run.profile, run.profile.rl_data) | _rollouts(run)


def entropy_prompts(run: Run) -> dict[str, Any]:
    """Return the number of prompts whose tokens are measured."""
    return {"prompts": run.profile.evaluation.traced}


def base(run: Run) -> dict[str, Any]:
    """Return the weights of the base, with which a policy is compared."""
    return {"base": run.base.weights}


def exploration(*names: str) -> Part:
    """Return the part that holds these settings of the section ``exploration``."""
    return lambda run: {name: getattr(run.profile.exploration, name) for name in names}


def branch_guide(run: Run) -> dict[str, Any]:
    """Return the guide ``branch`` and the entropies that it is made from."""
    guide = run.profile.guide_choice("branch")
    return {"guide": guide, "entropies": _entropy_digest(run.profile, guide)}


def traces(run: Run) -> dict[str, Any]:
    """Return the policy, the held-out data, and the guides of :data:`TRACED`."""
    profile, guides = run.profile, [run.profile.guide_choice(name) for name in TRACED]
    entropies = [_entropy_digest(profile, guide) for guide in guides]
    part: dict[str, Any] = {"guides": guides, "entropies": entropies}
    part["problems"] = (profile.evaluation.traced, profile.evaluation.sampled)
    return part | _policy(run) | _held_out_data(profile) | _rollouts(run)


def optimum(run: Run) -> dict[str, Any]:
    """Return the policy, the problems that are listed, and the guides that read no rewards."""
    profile, evaluation = run.profile, run.profile.evaluation
    choices = [method.guide for method in profile.methods.values() if method.guide]
    guides = [guide for guide in choices if not reads_rewards(guide)]
    entropies = [_entropy_digest(profile, guide) for guide in guides]
    shown = [_content(data) for data in evaluation.data if not data.ood]
    part = {"problems": shown, "listed": evaluation.listed}
    return part | {"guides": guides, "entropies": entropies} | _policy(run)


def samples(run: Run) -> dict[str, Any]:
    """Return what is drawn ("sampled": policy, data and sampling), and how many are scored."""
    evaluation = run.profile.evaluation
    sampling = {key: getattr(evaluation, key) for key in _SAMPLING}
    drawn = _policy(run) | _held_out_data(run.profile) | {"sampling": sampling}
    part = {"sampled": drawn, "scored": evaluation.scored, **_tempered(run.profile)}
    if evaluation.texts:
        part["kept"] = evaluation.texts
    return part


def demonstrated(profile: Profile, rft: Rft) -> Profile:
    """Return the profile whose SFT data a method learns from by ``rft.demonstrations``."""
    changes = [f"sft_data.{k}={json.dumps(v)}" for k, v in (rft.demonstrations or {}).items()]
    return load_profile("+".join([profile.spec, *changes]))


def _policy(run: Run) -> dict[str, Any]:
    """Return the policy that a run starts from or measures, also before it is taken."""
    assert run.policy is not None
    source = run.policy if run.policy.weights else run.policy.made_below()
    return {"policy": (run.policy.fingerprint, source.weights if source else "")}


def _tempered(profile: Profile) -> dict[str, Any]:
    return {"tempered": profile.evaluation.tempered} if profile.evaluation.tempered else {}


def _rollouts(run: Run) -> dict[str, Any]:
    return {"rollouts": {key: run.profile.rl.get(key) for key in (*ROLLOUTS, "seed")}}


def _held_out_data(profile: Profile) -> dict[str, Any]:
    """Return the held-out data sets with their labels, which decide a sample's random stream."""
    return {"data": [(data.label, _content(data)) for data in profile.evaluation.data]}


def _content(data: Data | None) -> dict[str, Any] | None:
    """Return what decides a data set; not how its results are shown."""
    if data is None:
        return None
    fields = {"rows": data.rows, "seed": data.seed, "revision": data.revision}
    fields |= {"skipped": data.skipped} if data.skipped else {}
    return {**fields, **data.task.identity()}


def _learning(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in _BOOKKEEPING}


def _training_set(profile: Profile, data: Data | None) -> dict[str, Any]:
    """Return a training set, and a hash of the held-out questions that are left out of it."""
    return {"data": _content(data), "held out": digest(sorted(problems.met(profile, data)))}


def _entropy_digest(profile: Profile, guide: Mapping[str, Any] | None) -> str:
    """Return a hash of the entropies that a guide is made from; "" where it needs none."""
    if guide is None or not needs_entropies(guide):
        return ""
    path = paths.measured(profile.name) / "entropies" / "entropy.json"
    return digest(path.read_text()) if path.is_file() else "not measured"
