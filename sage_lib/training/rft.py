"""Rejection-sampling fine-tuning (exploration report, 4.4.1), the rounds of a method with ``rft``.

A round draws completions of RL's prompts as RL does. The report's rules refuse some of them
(:mod:`sage_lib.tasks.filters`). The round selects correct ones, and fine-tunes the policy on them.
A killed run resumes from its samples, its last checkpoint and its last whole round.
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
from sage_lib.experiment.runs import Run
from sage_lib.experiment.settings import ROLLOUTS, Profile, Rft
from sage_lib.files import append_line, read_lines, write_bytes, write_text
from sage_lib.policy import loading, sampling, scoring
from sage_lib.tasks import filters
from sage_lib.tasks.judging import digest, judge, require_golds, require_steps
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.table import task_of
from sage_lib.tasks.verifier import Verifier
from sage_lib.training.callbacks import WHOLE, StepLog, arguments, exact_log, train_on, truncate_log
from sage_lib.training.models import add_lora, load_model, merged

#: Counts of a round in rounds.csv: completions drawn, correct, refused by each rule, eligible
#: (correct and not refused), selected; and wrong and distinct ones among the selected.
COUNTS = ("drawn", "correct", *filters.REFUSALS, "eligible", "selected", "wrong", "distinct")


@dataclass(frozen=True)
class Candidate:
    """A completion up to its first answer that no rule refuses, with means over its tokens."""

    problem_number: int  # in the round
    number: int  # of the sample
    ids: tuple[int, ...]  # without the end token
    text: str
    correct: bool
    entropy: float  # nats
    branching: float  # tokens within 95 % of the mass


#: Scores of selections, which take the largest.
SCORES = ("entropy", "branching")


def select(candidates: Sequence[Candidate], rft: Rft, rng: random.Random) -> list[Candidate]:
    """Return the completions that a round learns from, in random order.

    ``rft.selected`` is their number, ``rft.noise`` the share of wrong ones, and ``rft.select`` the
    score by which the correct ones are the best; "random" takes any. With too few correct
    candidates all of them are selected, and the same share of wrong ones.
    """
    correct = [candidate for candidate in candidates if candidate.correct]
    wrong = [candidate for candidate in candidates if not candidate.correct]
    count = min(len(correct), rft.selected - round(rft.noise * rft.selected))
    if rft.select in SCORES:
        correct.sort(key=lambda c: (-getattr(c, rft.select), c.problem_number, c.number))
        selection = correct[:count]
    else:
        selection = rng.sample(correct, count)
    wrong_count = min(len(wrong), round(count * rft.noise / (1 - rft.noise)))
    selection += rng.sample(wrong, wrong_count)
    rng.shuffle(selection)
    return selection


def prompts_of(rl_problems: Sequence[Problem], rft: Rft, seed: int, number: int) -> list[Problem]:
    """Return the ``rft.prompts`` problems of a round, whose number counts from 0: the next ones of
    a seeded order, over and over."""
    if rft.prompts > len(rl_problems):
        raise SageError(
            f"a round asks {rft.prompts} prompts and rl_data has {len(rl_problems)}: lower "
            "rft.prompts"
        )
    order = random.Random(seed).sample(range(len(rl_problems)), len(rl_problems))
    first = number * rft.prompts
    return [rl_problems[order[i % len(order)]] for i in range(first, first + rft.prompts)]


def train(profile: Profile, run: Run) -> dict:
    """Train a method from the SFT model by rounds, and return the run record.

    It writes steps.jsonl (gradient steps, counted through all rounds), exact.jsonl (at the end of
    each round) and rounds.csv.
    """
    method, rft = profile.methods[run.method], profile.rft_of(run.method)
    seed = profile.seeds[0] if run.seed is None else run.seed
    work = Rounds(profile, run, rft, seed)
    recorded = {"method": run.method, **method.recorded(), "rft": dataclasses.asdict(rft)}
    recorded |= {"lora": work.lora, "rollouts": {key: profile.rl[key] for key in ROLLOUTS}}
    record = run.begin(seed, recorded)
    start = sum((work.folder(number) / WHOLE).is_file() for number in range(rft.rounds))
    model = work.load_policy(start)
    for log in (work.rounds, run.build / "exact.jsonl"):
        truncate_log(log, work.step(start) if start else -1)
    if start == 0 and work.exact:
        work.exact.begin(model)
    for number in range(start, rft.rounds):
        row = work.run_round(number, model)
        # Loaded again, as a resumed run loads it: a trainer leaves another forward on a model.
        model, step = work.load_policy(number + 1), work.step(number + 1)
        if work.exact:
            work.exact.append(model, step)
        append_line(work.rounds, {"round": number + 1, "step": step, **row})
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
        data=digest(work.problems),
        reference=loading.weights_hash(work.base_folder),
        weights=loading.weights_hash(run.model),
        drawn=sum(row["drawn"] for row in rounds),
        collapsed=None,
    )
    for number in range(rft.rounds):
        shutil.rmtree(work.folder(number), ignore_errors=True)
    return written


class Rounds:
    """The rounds of a run, with their problems, verifier and logs. Rounds count from 0."""

    def __init__(self, profile: Profile, run: Run, rft: Rft, seed: int):
        self.profile, self.run, self.rft, self.seed = profile, run, rft, seed
        self.base_folder = runs.sft_run(profile).model
        self.lora = profile.rl_lora if profile.methods[run.method].lora else None
        self.tokenizer = loading.load_tokenizer(profile.model, self.base_folder)
        self.problems = problems.rl_problems(profile)
        self.verifier = Verifier(workers=profile.compute.threads)
        require_golds(self.problems, self.verifier)
        if profile.methods[run.method].reward == "valid":
            require_steps(self.problems)
        self.rounds = run.build / "rounds.jsonl"
        self.exact = exact_log(profile, run, self.tokenizer)

    def folder(self, number: int) -> Path:
        """Return the folder of a round's samples, checkpoints and weights."""
        return self.run.build / f"round{number + 1}"

    def load_policy(self, number: int) -> PreTrainedModel:
        """Load the policy after a number of rounds, ready to be trained."""
        checkpointing = self.rft.sft.get("gradient_checkpointing", False)
        weights = self.folder(number - 1) / "weights"
        start = weights if number and self.lora is None else self.base_folder
        fast = unsloth_first.is_loaded()  # as for SFT
        model, _ = load_model(self.profile, start, self.lora is None, checkpointing, fast)
        if not fast:  # Unsloth's is there; others draw before a trainer moves them
            model.to(loading.device())
        if self.lora is None:
            return model
        adapted = add_lora(model, self.lora, self.seed, checkpointing, fast)
        if number:
            set_peft_model_state_dict(adapted, load_peft_weights(str(weights)))
        return adapted

    def step(self, number: int) -> int:
        """Return the gradient step after a number of rounds."""
        return number * int(self.rft.sft["max_steps"])

    def run_round(self, number: int, model: PreTrainedModel) -> dict[str, Any]:
        """Draw, select, fine-tune and save the weights. Return the round's row of rounds.csv."""
        folder = self.folder(number)
        folder.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        if self.rft.demonstrations is not None:
            rows, counts = self.demonstrations(number)
        else:
            rows, counts = self.policy_samples(number, model)
        drawing = time.perf_counter() - started
        checkpoints, seed = folder / "checkpoints", self.seed + number
        fixed = {"output_dir": str(checkpoints), "seed": seed, "data_seed": seed}
        # TRL would learn prompts, too, and cut rows at 1,024 tokens.
        section = {"completion_only_loss": True, "max_length": self.profile.model.max_seq_length}
        section |= self.rft.sft
        means: dict[str, float] = {k: counts[k] for k in ("reward", "entropy") if k in counts}
        trainer = SFTTrainer(
            model=model,
            processing_class=self.tokenizer,
            train_dataset=Dataset.from_list(rows),
            args=arguments(SFTConfig, section, f"{self.profile.name}: rft.sft", **fixed),
            callbacks=[StepLog(self.run.live_steps, self.step(number), means)],
        )
        train_on(trainer, checkpoints)
        seconds = time.perf_counter() - started
        trainer.model.save_pretrained(folder / "weights")
        self.tokenizer.save_pretrained(folder / "weights")  # read where all weights are trained
        times = {"seconds drawing": round(drawing, 2)}
        times["seconds training"] = round(seconds - drawing, 2)
        return {**counts, **times}

    def demonstrations(self, number: int) -> tuple[list[dict], dict[str, Any]]:
        """Return a round's share of the demonstrations, and its entries of rounds.csv."""
        profile = demonstrated(self.profile, self.rft)
        rows = problems.sft_rows(profile, lambda text: len(self.tokenizer(text)["input_ids"]))
        total = self.rft.rounds * self.rft.selected
        if len(rows) < total:
            raise SageError(f"rft asks for {total} demonstrations and sft_data has {len(rows)}")
        share = rows[number * self.rft.selected : (number + 1) * self.rft.selected]
        counts = dict.fromkeys(COUNTS, 0) | {"selected": len(share)}
        return share, counts | {"distinct": len({str(row) for row in share})}

    def policy_samples(
        self, number: int, model: PreTrainedModel
    ) -> tuple[list[dict], dict[str, Any]]:
        """Draw and select completions. Return the selection as SFTTrainer's rows, and the round's
        entries of rounds.csv. Samples that are in the round's folder are not drawn again."""
        posed = prompts_of(self.problems, self.rft, self.seed, number)
        draws = self.sampling(number)
        path = self.folder(number) / "samples.jsonl"
        engine = sampling.transformers_engine(model, self.tokenizer, posed, draws)
        sampling.sample(engine, self.tokenizer, posed, draws, path)
        samples = sampling.collect([path], posed, draws.samples)
        candidates, refused, correct = self.candidates(model.eval(), posed, samples)
        selection = select(candidates, self.rft, random.Random(f"{self.seed}/{number}"))
        if not selection:
            raise SageError(
                f"round {number + 1} of {self.run.name} has no correct completion that the rules "
                "keep: draw more (rft.prompts, rft.samples), or start from a better base"
            )
        total = len(posed) * draws.samples
        eligible = [candidate for candidate in candidates if candidate.correct]
        wrong = sum(not candidate.correct for candidate in selection)
        distinct = {(candidate.problem_number, candidate.ids) for candidate in selection}
        counts = [total, correct, *(refused[name] for name in filters.REFUSALS), len(eligible)]
        counts += [len(selection), wrong, len(distinct)]
        entries: dict[str, Any] = dict(zip(COUNTS, counts, strict=True))
        entries["reward"] = correct / total
        entries["entropy"] = float(np.mean([candidate.entropy for candidate in candidates]))
        entries |= _means("eligible", eligible) | _means("selected", selection)
        prompts = [loading.encode(self.tokenizer, problem.question) for problem in posed]
        rows = []
        for candidate in selection:  # as drawn tokens; the mask is 1 on the completion
            prompt = prompts[candidate.problem_number]
            ids = [*candidate.ids, self.tokenizer.eos_token_id]
            mask = [0] * len(prompt) + [1] * len(ids)
            rows.append({"input_ids": [*prompt, *ids], "completion_mask": mask})
        return rows, entries

    def sampling(self, number: int) -> Any:
        """Return the sampling of a round. Seeds of rounds lie far apart: a prompt that returns must
        not get the random numbers of its last round."""
        rl = self.profile.rl
        return SimpleNamespace(
            **{key: rl[key] for key in ("temperature", "top_p", "top_k", "min_p")},
            max_new_tokens=rl["max_completion_length"],
            samples=self.rft.samples,
            batch_size=self.profile.evaluation.batch_size,
            seed=self.seed + 1_000_000 * (number + 1),
        )

    def candidates(
        self, model: PreTrainedModel, posed: Sequence[Problem], samples: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Candidate], Counter[str], int]:
        """Apply the rules to the samples of a round, of which each of the ``posed`` problems has a
        row. A completion counts up to its first answer, as it is learned.

        Returns:
            The candidates, scored by the model, the number of refused completions by rule, and the
            number of correct ones.
        """
        candidates: list[Candidate] = []
        refused: Counter[str] = Counter()
        right = 0
        pad = loading.pad_id(self.tokenizer)
        for problem_number, (problem, row) in enumerate(zip(posed, samples, strict=True)):
            texts = [filters.up_to_first_answer(text) or text for text in row["completions"]]
            correct = judge([problem] * len(texts), texts, self.verifier, self.profile.model.boxed)
            if self.profile.methods[self.run.method].reward == "valid":
                measures, pairs = task_of(problem.task).measures, zip(texts, correct, strict=True)
                correct = [bool(measures(problem, *pair)["valid"]) for pair in pairs]
            right += sum(correct)
            reasons = [filters.refusal(text, self.rft.redundancy) for text in texts]
            refused.update(reason for reason in reasons if reason is not None)
            cut = [(n, self._cut(row["ids"][n])) for n, why in enumerate(reasons) if why is None]
            prompt = loading.encode(self.tokenizer, problem.question)
            bodies = [[*ids, self.tokenizer.eos_token_id] for _, ids in cut]
            scored = scoring.signals(model, model, prompt, bodies, pad)
            for (n, ids), signals in zip(cut, scored, strict=True):
                candidate = Candidate(
                    *(problem_number, n, tuple(ids), texts[n], correct[n]),
                    entropy=float(signals.entropy.mean()),
                    branching=float(signals.branching.mean()),
                )
                candidates.append(candidate)
        return candidates, refused, right

    def _cut(self, ids: list[int]) -> list[int]:
        """Return the fewest leading tokens that hold the first answer."""
        for length in range(1, len(ids) + 1):
            text = self.tokenizer.decode(ids[:length], skip_special_tokens=True)
            if filters.up_to_first_answer(text):
                break
        return ids[:length]


def _means(name: str, candidates: Sequence[Candidate]) -> dict[str, float]:
    """Return means of scores and numbers of tokens, over completions."""
    columns = {key: [getattr(candidate, key) for candidate in candidates] for key in SCORES}
    columns["tokens"] = [len(candidate.ids) + 1 for candidate in candidates]
    return {f"{name} {key}": float(np.mean(column)) for key, column in columns.items()}
