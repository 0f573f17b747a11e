"""Rejection-sampling fine-tuning (exploration report, 4.4.1), the rounds of a method with ``rft``.

A round draws completions of RL's prompts as RL draws its rollouts, keeps what the report's rules
keep (:mod:`sage_lib.tasks.filters`), selects correct ones, and fine-tunes on them by SFTTrainer.
The policy goes on from round to round: one adapter, or all weights. A killed run goes on from its
samples, its last checkpoint and its last whole round.
"""

import dataclasses
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from sage_lib.experiment.profile import Profile, Rft
from sage_lib.experiment.profile_checks import DEMONSTRATIONS, ROLLOUTS
from sage_lib.experiment.records import Record
from sage_lib.experiment.runs import Run
from sage_lib.files import append_line, read_json, read_lines, write_bytes, write_json, write_text
from sage_lib.policy import loading, sampling, scoring, token_signals
from sage_lib.tasks import filters
from sage_lib.tasks.judging import digest, judge, require_golds
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.verifier import Verifier
from sage_lib.training.callbacks import (
    WHOLE,
    StepLog,
    arguments,
    exact_log,
    taken_back,
    train_on,
)
from sage_lib.training.models import add_lora, load_model, merged

#: Means of a round that its gradient steps log, as RL's steps do.
ROUND_MEANS: tuple[str, ...] = ("reward", "entropy")
#: Counts of a round in rounds.csv: completions drawn, correct, refused by each rule, eligible (they
#: are correct and no rule refuses them), selected, wrong and different ones among the selected.
COUNTS = ("drawn", "correct", *filters.REFUSALS, "eligible", "selected", "wrong", "distinct")


@dataclass(frozen=True)
class Candidate:
    """A completion that the rules keep, up to its first answer: who asked for it (place of the
    problem in the round, number of the sample), whether it is right, and means over its tokens."""

    place: int
    number: int
    ids: tuple[int, ...]  # without the end token
    text: str
    correct: bool
    entropy: float  # nats
    branching: float  # tokens within 95 % of the mass
    perplexity: float  # under the policy that drew it
    position: float  # where its entropy lies, from 0 (first token) to 1 (last)


#: Larger is better, by the name of a selection. The report selects by entropy and by branching
#: factor; perplexity and position are what its eq. 7 and 8 shape advantages by.
SCORES: Mapping[str, Callable[[Candidate], float]] = {
    "entropy": lambda one: one.entropy,
    "branching": lambda one: one.branching,
    "perplexity": lambda one: -one.perplexity,
    "position": lambda one: one.position,
}


def select(candidates: Sequence[Candidate], rft: Rft, rng: random.Random) -> list[Candidate]:
    """What a round learns from, in random order.

    ``rft.selected`` candidates, of which a share ``rft.noise`` is wrong (drawn at random) and the
    others are correct: those of the best score, ties by place and number, or with "random" any. Of
    fewer correct ones all are taken, and the share of wrong ones stays.
    """
    correct = [one for one in candidates if one.correct]
    wrong = [one for one in candidates if not one.correct]
    wanted = min(len(correct), rft.selected - round(rft.noise * rft.selected))
    if rft.select in SCORES:
        score = SCORES[rft.select]
        chosen = sorted(correct, key=lambda one: (-score(one), one.place, one.number))[:wanted]
    else:
        chosen = rng.sample(correct, wanted)
    noisy = min(len(wrong), round(wanted * rft.noise / (1 - rft.noise)))
    chosen += rng.sample(wrong, noisy)
    rng.shuffle(chosen)
    return chosen


def prompts_of(asked: Sequence[Problem], rft: Rft, seed: int, number: int) -> list[Problem]:
    """The problems of round ``number`` (from 0): the next ones of a seeded order, again and again.

    Raises SageError where there are fewer problems than a round asks.
    """
    order = random.Random(seed).sample(range(len(asked)), len(asked))
    first = number * rft.prompts
    places = [order[place % len(order)] for place in range(first, first + rft.prompts)]
    if len(set(places)) < len(places):
        raise SageError(
            f"a round asks {rft.prompts} prompts and rl_data has {len(order)}: lower rft.prompts"
        )
    return [asked[place] for place in places]


@dataclass(frozen=True)
class Draws:
    """How a round samples: as RL does (``sampling.SamplingSettings``)."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float | None
    max_new_tokens: int
    samples: int
    batch_size: int
    seed: int


def train(profile: Profile, run: Run) -> dict:
    """Train one method from the SFT model by rounds; save the merged policy; returns the record.

    Beside the record lie steps.jsonl (gradient steps, counted through all rounds), exact.jsonl (at
    the end of each round) and rounds.csv. Raises SageError where a round has nothing to learn from.
    """
    reference = runs.sft_run(profile)
    if not reference.done():
        raise SageError(
            f"RFT starts from the SFT model of profile {profile.name}, which is not there: "
            f"sage-companion stage sft --profile {profile.spec} makes it, or takes it from a "
            "profile with the same base"
        )
    chosen, rft = profile.methods[run.method], profile.rft_of(run.method)
    seed = profile.seeds[0] if run.seed is None else run.seed
    lora = profile.rl_lora if chosen.lora else None
    kept = {"method": run.method, **dataclasses.asdict(chosen), "rft": dataclasses.asdict(rft)}
    rollouts = {key: profile.rl[key] for key in ROLLOUTS}
    record = Record(
        "rl", profile.name, run.fingerprint, seed, {**kept, "lora": lora, "rollouts": rollouts}
    )
    work = Rounds(profile, run, rft, seed)
    whole = [n for n in range(rft.rounds) if (work.folder(n) / WHOLE).is_file()]
    model = work.load(len(whole))
    work.go_back(len(whole), model)
    for number in range(len(whole), rft.rounds):
        work.do(number, model)
        # Loaded anew, since a trainer leaves its own forward on a model; a resumed run does alike.
        model = work.load(number + 1)
        work.end(number, model)
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
        reference=loading.weights_hash(reference.model),
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

    def go_back(self, whole: int, model: PreTrainedModel) -> None:
        """Take the logs back to the end of the last whole round; log the base before the first."""
        for log in (self.rounds, self.run.build / "exact.jsonl"):
            taken_back(log, self.step(whole) if whole else -1)
        if not whole and self.exact:
            self.exact.begin(model)

    def do(self, number: int, model: PreTrainedModel) -> None:
        """One round: draw, select, fine-tune, keep the weights."""
        folder = self.folder(number)
        folder.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        if self.rft.select in DEMONSTRATIONS:
            rows, said = self.demonstrations(number)
        else:
            rows, said = self.own_samples(number, model, folder)
        drawn = time.perf_counter() - started
        seeds = {"seed": self.seed + number, "data_seed": self.seed + number}
        fixed = {"report_to": "none", "disable_tqdm": True, **seeds}
        checkpoints = folder / "checkpoints"
        beside: dict[str, float] = {key: said[key] for key in ROUND_MEANS if key in said}
        trainer = SFTTrainer(
            model=model,
            processing_class=self.tokenizer,
            train_dataset=Dataset.from_list(rows),
            args=arguments(SFTConfig, self.rft.sft, output_dir=str(checkpoints), **fixed),
            callbacks=[StepLog(self.run.live_steps, self.step(number), beside)],
        )
        train_on(trainer, checkpoints)
        seconds = time.perf_counter() - started
        trainer.model.save_pretrained(folder / "weights")
        times = {"seconds drawing": round(drawn, 2), "seconds training": round(seconds - drawn, 2)}
        write_json(folder / "said.json", {**said, **times})

    def end(self, number: int, model: PreTrainedModel) -> None:
        """Log a round, whose trained policy ``model`` is, and mark it as whole."""
        folder, step = self.folder(number), self.step(number + 1)
        if self.exact:
            self.exact.append(model, step)
        said = read_json(folder / "said.json")
        append_line(self.rounds, {"round": number + 1, "step": step, **said})
        (folder / WHOLE).touch()
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    def demonstrations(self, number: int) -> tuple[list[dict], dict[str, Any]]:
        """A round's share of the first or last rows of the SFT data, and what rounds.csv says."""
        rows = problems.sft_rows(self.profile, lambda text: len(self.tokenizer(text)["input_ids"]))
        wanted = self.rft.rounds * self.rft.selected
        if len(rows) < wanted:
            raise SageError(f"rft asks for {wanted} demonstrations and sft_data has {len(rows)}")
        part = rows[-wanted:] if self.rft.select == "last_demonstrations" else rows[:wanted]
        chosen = part[number * self.rft.selected : (number + 1) * self.rft.selected]
        texts = {str(row) for row in chosen}
        counts = dict.fromkeys(COUNTS, 0)
        return chosen, {**counts, "selected": len(chosen), "distinct": len(texts)}

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
        found, refused, correct = self.candidates(model, posed, drawn)
        chosen = select(found, self.rft, random.Random(f"{self.seed}/{number}"))
        if not chosen:
            raise SageError(
                f"round {number + 1} of {self.run.name} has no correct completion that the rules "
                "keep: draw more (rft.prompts, rft.samples), or start from a better base"
            )
        total = len(posed) * draws.samples
        eligible = [one for one in found if one.correct]
        said: dict[str, Any] = {
            "drawn": total,
            "correct": correct,
            **{name: refused[name] for name in filters.REFUSALS},
            "eligible": len(eligible),
            "selected": len(chosen),
            "wrong": sum(not one.correct for one in chosen),
            "distinct": len({(one.place, one.ids) for one in chosen}),
            "reward": correct / total,
            "entropy": float(np.mean([one.entropy for one in found])),
        }
        said |= _means("eligible", eligible) | _means("selected", chosen)
        prompts = [loading.encode(self.tokenizer, problem.question) for problem in posed]
        end = self.tokenizer.eos_token_id
        return [_row(prompts[one.place], one.ids, end) for one in chosen], said

    def settings(self, number: int) -> Draws:
        """How round ``number`` samples. Seeds of rounds are far apart, since a prompt that returns
        must not meet the random numbers of its last time."""
        rl = self.profile.rl
        return Draws(
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

        A completion is judged as it is learned from, up to its first answer.
        """
        found: list[Candidate] = []
        refused: Counter[str] = Counter()
        right = 0
        for place, (problem, row) in enumerate(zip(posed, drawn, strict=True)):
            texts = [filters.up_to_first_answer(text) or text for text in row["completions"]]
            verdicts = judge([problem] * len(texts), texts, self.verifier)
            right += sum(verdicts)
            kept: list[tuple[int, list[int]]] = []
            for number, (text, ids) in enumerate(zip(texts, row["ids"], strict=True)):
                reason = filters.refusal(text, self.rft.redundancy)
                if reason is None:
                    kept.append((number, self._cut(ids, text)))
                else:
                    refused[reason] += 1
            for (number, ids), values in zip(
                kept, self._signals(model, problem, kept), strict=True
            ):
                found.append(
                    Candidate(place, number, tuple(ids), texts[number], verdicts[number], *values)
                )
        return found, refused, right

    def _cut(self, ids: list[int], text: str) -> list[int]:
        """The fewest leading tokens that hold ``text``, which ends with the first answer."""
        for length in range(1, len(ids) + 1):
            if filters.up_to_first_answer(
                self.tokenizer.decode(ids[:length], skip_special_tokens=True)
            ):
                return ids[:length]
        raise ValueError(f"no prefix of the tokens holds {text!r}")

    def _signals(
        self, model: PreTrainedModel, problem: Problem, kept: Sequence[tuple[int, list[int]]]
    ) -> Iterator[tuple[float, float, float, float]]:
        """Entropy, branching factor, perplexity and position of each completion of a problem."""
        if not kept:
            return
        prompt = loading.encode(self.tokenizer, problem.question)
        bodies = [[*ids, self.tokenizer.eos_token_id] for _, ids in kept]
        model.eval()
        pad = self.tokenizer.pad_token_id
        for one in scoring.signals(model, model, prompt, bodies, pad):
            perplexity = token_signals.perplexity(one.base_log_pi)
            entropy = float(one.entropy.mean())
            yield entropy, float(one.branching.mean()), perplexity, position(one.entropy)


def position(entropy: np.ndarray) -> float:
    """Where the entropy of a completion lies, given that of its tokens, shape (tokens,).

    The mean relative position of its tokens (0 the first, 1 the last), weighted by their entropy;
    0.5 where there is none.
    """
    total = float(entropy.sum())
    if len(entropy) < 2 or total <= 0:
        return 0.5
    return float(np.linspace(0, 1, len(entropy)) @ entropy / total)


def _means(name: str, chosen: Iterable[Candidate]) -> dict[str, float]:
    """Means of what selections go by, over completions, and of their tokens."""
    listed = list(chosen)
    values: dict[str, list[float]] = {
        key: [getattr(one, key) for one in listed]
        for key in ("entropy", "branching", "perplexity", "position")
    }
    values["tokens"] = [len(one.ids) + 1 for one in listed]
    return {f"{name} {key}": float(np.mean(found)) for key, found in values.items() if found}


def _row(prompt: list[int], ids: Sequence[int], end: int) -> dict[str, list[int]]:
    """A row for SFTTrainer in tokens, as they were drawn: prompt, completion, end; the mask is 1
    where it is learned."""
    answer = [*ids, end]
    mask = [0] * len(prompt) + [1] * len(answer)
    return {"input_ids": [*prompt, *answer], "completion_mask": mask}
