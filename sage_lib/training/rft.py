"""Rejection-sampling fine-tuning (exploration report, 4.4.1), the rounds of a method with ``rft``.

A round draws completions of RL's prompts as RL does, keeps what the report's rules keep
(:mod:`sage_lib.tasks.filters`), selects correct ones, and fine-tunes the policy on them. A killed
run goes on from its samples, its last checkpoint and its last whole round.
"""

import dataclasses
import random
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from datasets import Dataset
from peft import load_peft_weights, set_peft_model_state_dict
from transformers import PreTrainedModel

from sage_lib.algorithm import unsloth_first
from sage_lib.algorithm.backend import SFTConfig, SFTTrainer
from sage_lib.errors import SageError
from sage_lib.experiment import problems, runs
from sage_lib.experiment.made_from import demonstrated
from sage_lib.experiment.records import Record
from sage_lib.experiment.runs import Run
from sage_lib.experiment.settings import ROLLOUTS, Profile, Rft
from sage_lib.files import append_line, read_lines, write_bytes, write_text
from sage_lib.policy import loading, sampling, scoring
from sage_lib.tasks import filters
from sage_lib.tasks.judging import digest, judge, require_golds, require_steps
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.table import task_of
from sage_lib.tasks.verifier import Verifier
from sage_lib.training.callbacks import WHOLE, StepLog, arguments, exact_log, taken_back, train_on
from sage_lib.training.models import add_lora, load_model, merged

#: Counts of a round in rounds.csv: completions drawn, correct, refused by each rule, eligible (they
#: are correct and no rule refuses them), selected, wrong and different ones among the selected.
COUNTS = ("drawn", "correct", *filters.REFUSALS, "eligible", "selected", "wrong", "distinct")


@dataclass(frozen=True)
class Candidate:
    """A completion that the rules keep, up to its first answer, with means over its tokens."""

    place: int  # of its problem in the round
    number: int  # of the sample
    ids: tuple[int, ...]  # without the end token
    text: str
    correct: bool
    entropy: float  # nats
    branching: float  # tokens within 95 % of the mass


#: What selections go by: the largest are taken.
SCORES = ("entropy", "branching")


def select(candidates: Sequence[Candidate], rft: Rft, rng: random.Random) -> list[Candidate]:
    """What a round learns from, in random order: ``rft.selected`` candidates, of which a share
    ``rft.noise`` is wrong and the others have the best scores among the correct, or with "random"
    any. Of fewer correct ones all are taken, and the share of wrong ones stays."""
    correct = [one for one in candidates if one.correct]
    wrong = [one for one in candidates if not one.correct]
    wanted = min(len(correct), rft.selected - round(rft.noise * rft.selected))
    if rft.select in SCORES:
        correct.sort(key=lambda one: (-getattr(one, rft.select), one.place, one.number))
        chosen = correct[:wanted]
    else:
        chosen = rng.sample(correct, wanted)
    noisy = min(len(wrong), round(wanted * rft.noise / (1 - rft.noise)))
    chosen += rng.sample(wrong, noisy)
    rng.shuffle(chosen)
    return chosen


def prompts_of(asked: Sequence[Problem], rft: Rft, seed: int, number: int) -> list[Problem]:
    """The problems of round ``number`` (from 0): the next of a seeded order, over and over."""
    order = random.Random(seed).sample(range(len(asked)), len(asked))
    first = number * rft.prompts
    places = [order[place % len(order)] for place in range(first, first + rft.prompts)]
    if len(set(places)) < len(places):
        raise SageError(
            f"a round asks {rft.prompts} prompts and rl_data has {len(order)}: lower rft.prompts"
        )
    return [asked[place] for place in places]


def train(profile: Profile, run: Run) -> dict:
    """Train one method from the SFT model by rounds, for :func:`rl.train`; returns the record.

    Beside the record lie steps.jsonl (gradient steps, counted through all rounds), exact.jsonl (at
    the end of each round) and rounds.csv.
    """
    chosen, rft = profile.methods[run.method], profile.rft_of(run.method)
    seed = profile.seeds[0] if run.seed is None else run.seed
    work = Rounds(profile, run, rft, seed)
    kept = {"method": run.method, **dataclasses.asdict(chosen), "rft": dataclasses.asdict(rft)}
    kept |= {"lora": work.lora, "rollouts": {key: profile.rl[key] for key in ROLLOUTS}}
    record = Record("rl", profile.name, run.fingerprint, seed, kept)
    whole = [n for n in range(rft.rounds) if (work.folder(n) / WHOLE).is_file()]
    model = work.load(len(whole))
    for log in (work.rounds, run.build / "exact.jsonl"):
        taken_back(log, work.step(len(whole)) if whole else -1)
    if not whole and work.exact:
        work.exact.begin(model)
    for number in range(len(whole), rft.rounds):
        said = work.do(number, model)
        # Loaded anew, since a trainer leaves its own forward on a model; a resumed run does alike.
        model, step = work.load(number + 1), work.step(number + 1)
        if work.exact:
            work.exact.append(model, step)
        append_line(work.rounds, {"round": number + 1, "step": step, **said})
        (work.folder(number) / WHOLE).touch()
        shutil.rmtree(work.folder(number) / "checkpoints", ignore_errors=True)
    merged(model).save_pretrained(run.model)
    work.tokenizer.save_pretrained(run.model)
    run.publish_steps()
    rounds = read_lines(work.rounds)
    write_text(run.measured / "rounds.csv", pd.DataFrame(rounds).to_csv(index=False))
    if work.exact:
        write_bytes(run.measured / "exact.jsonl", work.exact.path.read_bytes())
    written = run.finish(
        record,
        data=digest(work.asked),
        reference=loading.weights_hash(work.reference),
        weights=loading.weights_hash(run.model),
        drawn=sum(row["drawn"] for row in rounds),
        collapsed=None,
    )
    for number in range(rft.rounds):
        shutil.rmtree(work.folder(number), ignore_errors=True)
    return written


class Rounds:
    """What the rounds of a run share: settings, problems, judge, logs. Rounds count from 0."""

    def __init__(self, profile: Profile, run: Run, rft: Rft, seed: int):
        self.profile, self.run, self.rft, self.seed = profile, run, rft, seed
        self.reference = runs.sft_run(profile).model
        self.lora = profile.rl_lora if profile.methods[run.method].lora else None
        self.tokenizer = loading.load_tokenizer(profile.model, self.reference)
        self.asked = problems.rl_problems(profile)
        self.verifier = Verifier(workers=profile.compute.threads)
        require_golds(self.asked, self.verifier)
        if profile.methods[run.method].reward == "valid":
            require_steps(self.asked)
        self.rounds = run.build / "rounds.jsonl"
        self.exact = exact_log(profile, run, self.tokenizer)

    def folder(self, number: int) -> Path:
        """Where a round keeps its samples, checkpoints and weights."""
        return self.run.build / f"round{number + 1}"

    def load(self, number: int) -> PreTrainedModel:
        """The policy after so many rounds, ready to be trained."""
        checkpointing = self.rft.sft["gradient_checkpointing"]
        weights = self.folder(number - 1) / "weights"
        start = weights if number and self.lora is None else self.reference
        fast = unsloth_first.is_loaded()  # as for SFT
        model, _ = load_model(self.profile, start, self.lora is None, checkpointing, fast)
        if self.lora is None:
            return model
        adapted = add_lora(model, self.lora, self.seed, checkpointing, fast)
        if number:
            set_peft_model_state_dict(adapted, load_peft_weights(str(weights)))
        return adapted

    def step(self, number: int) -> int:
        """The gradient step after so many rounds."""
        return number * int(self.rft.sft["max_steps"])

    def do(self, number: int, model: PreTrainedModel) -> dict[str, Any]:
        """One round: draw, select, fine-tune, keep the weights; returns what rounds.csv says."""
        folder = self.folder(number)
        folder.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        if self.rft.demonstrations is not None:
            rows, said = self.demonstrations(number)
        else:
            rows, said = self.own_samples(number, model, folder)
        drawn = time.perf_counter() - started
        checkpoints, seed = folder / "checkpoints", self.seed + number
        fixed = {"output_dir": str(checkpoints), "seed": seed, "data_seed": seed}
        beside: dict[str, float] = {k: said[k] for k in ("reward", "entropy") if k in said}
        trainer = SFTTrainer(
            model=model,
            processing_class=self.tokenizer,
            train_dataset=Dataset.from_list(rows),
            args=arguments(SFTConfig, self.rft.sft, f"{self.profile.name}: rft.sft", **fixed),
            callbacks=[StepLog(self.run.live_steps, self.step(number), beside)],
        )
        train_on(trainer, checkpoints)
        seconds = time.perf_counter() - started
        trainer.model.save_pretrained(folder / "weights")
        times = {"seconds drawing": round(drawn, 2), "seconds training": round(seconds - drawn, 2)}
        return {**said, **times}

    def demonstrations(self, number: int) -> tuple[list[dict], dict[str, Any]]:
        """A round's share of the demonstrations, and what rounds.csv says."""
        shown = demonstrated(self.profile, self.rft)
        rows = problems.sft_rows(shown, lambda text: len(self.tokenizer(text)["input_ids"]))
        wanted = self.rft.rounds * self.rft.selected
        if len(rows) < wanted:
            raise SageError(f"rft asks for {wanted} demonstrations and sft_data has {len(rows)}")
        chosen = rows[number * self.rft.selected : (number + 1) * self.rft.selected]
        counts = dict.fromkeys(COUNTS, 0) | {"selected": len(chosen)}
        return chosen, counts | {"distinct": len({str(row) for row in chosen})}

    def own_samples(
        self, number: int, model: PreTrainedModel, folder: Path
    ) -> tuple[list[dict], dict[str, Any]]:
        """A round's selected completions as SFTTrainer's rows, and what rounds.csv says of it."""
        posed = prompts_of(self.asked, self.rft, self.seed, number)
        draws = self.settings(number)
        path = folder / "samples.jsonl"
        engine = sampling.transformers_engine(model, self.tokenizer, posed, draws)
        sampling.sample(engine, self.tokenizer, posed, draws, path)
        drawn = sampling.collect([path], posed, draws.samples)
        found, refused, correct = self.candidates(model.eval(), posed, drawn)
        chosen = select(found, self.rft, random.Random(f"{self.seed}/{number}"))
        if not chosen:
            raise SageError(
                f"round {number + 1} of {self.run.name} has no correct completion that the rules "
                "keep: draw more (rft.prompts, rft.samples), or start from a better base"
            )
        total = len(posed) * draws.samples
        eligible = [one for one in found if one.correct]
        wrong, distinct = sum(not one.correct for one in chosen), {(c.place, c.ids) for c in chosen}
        counts = [total, correct, *(refused[name] for name in filters.REFUSALS), len(eligible)]
        counts += [len(chosen), wrong, len(distinct)]
        said: dict[str, Any] = dict(zip(COUNTS, counts, strict=True))
        said["reward"] = correct / total
        said["entropy"] = float(np.mean([one.entropy for one in found]))
        said |= _means("eligible", eligible) | _means("selected", chosen)
        prompts = [loading.encode(self.tokenizer, problem.question) for problem in posed]
        rows = []
        for one in chosen:  # in tokens, as they were drawn; the mask is 1 where it is learned
            ids = [*one.ids, self.tokenizer.eos_token_id]
            mask = [0] * len(prompts[one.place]) + [1] * len(ids)
            rows.append({"input_ids": [*prompts[one.place], *ids], "completion_mask": mask})
        return rows, said

    def settings(self, number: int) -> Any:
        """How round ``number`` samples. Seeds of rounds lie far apart: a prompt that returns must
        not meet the random numbers of its last time."""
        rl = self.profile.rl
        return SimpleNamespace(
            **{key: rl[key] for key in ("temperature", "top_p", "top_k", "min_p")},
            max_new_tokens=rl["max_completion_length"],
            samples=self.rft.samples,
            batch_size=self.profile.evaluation.batch_size,
            seed=self.seed + 1_000_000 * (number + 1),
        )

    def candidates(
        self, model: PreTrainedModel, posed: Sequence[Problem], drawn: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Candidate], Counter[str], int]:
        """What the rules keep; how many they refused, by reason; how many of all were correct.
        A completion is judged as it is learned from, up to its first answer."""
        found: list[Candidate] = []
        refused: Counter[str] = Counter()
        right = 0
        for place, (problem, row) in enumerate(zip(posed, drawn, strict=True)):
            texts = [filters.up_to_first_answer(text) or text for text in row["completions"]]
            verdicts = judge([problem] * len(texts), texts, self.verifier)
            if self.profile.methods[self.run.method].reward == "valid":
                measures, pairs = task_of(problem.task).measures, zip(texts, verdicts, strict=True)
                verdicts = [bool(measures(problem, *pair)["valid"]) for pair in pairs]
            right += sum(verdicts)
            reasons = [filters.refusal(text, self.rft.redundancy) for text in texts]
            refused.update(reason for reason in reasons if reason is not None)
            kept = [(n, self._cut(row["ids"][n])) for n, why in enumerate(reasons) if why is None]
            prompt = loading.encode(self.tokenizer, problem.question)
            bodies = [[*ids, self.tokenizer.eos_token_id] for _, ids in kept]
            pad = self.tokenizer.pad_token_id
            signals = scoring.signals(model, model, prompt, bodies, pad) if kept else ()
            for (n, ids), one in zip(kept, signals, strict=True):
                own = Candidate(
                    *(place, n, tuple(ids), texts[n], verdicts[n]),
                    entropy=float(one.entropy.mean()),
                    branching=float(one.branching.mean()),
                )
                found.append(own)
        return found, refused, right

    def _cut(self, ids: list[int]) -> list[int]:
        """The fewest leading tokens that hold the first answer."""
        for length in range(1, len(ids) + 1):
            text = self.tokenizer.decode(ids[:length], skip_special_tokens=True)
            if filters.up_to_first_answer(text):
                break
        return ids[:length]


def _means(name: str, chosen: Sequence[Candidate]) -> dict[str, float]:
    """Means of what selections go by, over completions, and of their tokens."""
    rows = [[getattr(one, key) for key in SCORES] + [len(one.ids) + 1] for one in chosen]
    columns = zip((*SCORES, "tokens"), zip(*rows, strict=True), strict=True) if rows else ()
    return {f"{name} {key}": float(np.mean(found)) for key, found in columns}
