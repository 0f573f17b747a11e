"""What a single token is worth: replace it by the runner-up, roll both prefixes out again, compare
(exploration report, eq. 5-6)."""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sage_lib.evaluation import groups
from sage_lib.experiment import problems
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.records import Record
from sage_lib.experiment.runs import Run
from sage_lib.files import append_line, read_lines, write_text
from sage_lib.policy import token_signals
from sage_lib.policy.sampling import sample_seed, warpers
from sage_lib.tasks.problem import Problem

#: The part of a completion that is early, and late (exploration report, Figure 6b), and of the
#: completions that have a low, or a high perplexity (its Figure 5b).
END = 0.2


@torch.no_grad()
def impact(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    completion: Sequence[int],
    position: int,
    count: int,
    settings: Mapping[str, Any],
    seed: int,
    judged: Callable[[list[str]], Sequence[bool]],
) -> tuple[float, float]:
    """Accuracy of ``count`` continuations of the token at ``position`` (0-based), and of as many of
    its runner-up: I_t is their difference.

    ``prompt`` and ``completion`` are token ids, ``settings`` those of GRPOConfig; ``judged`` says
    which texts of whole completions are correct.
    """
    before, drawn = list(completion[:position]), completion[position]
    prefix = [*prompt, *before]
    ids = torch.tensor([prefix], device=model.device)
    logits = model(input_ids=ids).logits[0, -1:].float().cpu().numpy()
    other = int(token_signals.runner_up(logits, np.array([drawn]))[0])
    stops = model.generation_config.eos_token_id or tokenizer.eos_token_id
    ends = stops if isinstance(stops, list) else [stops]
    config = transformers.GenerationConfig(
        do_sample=True,
        max_new_tokens=max(settings["max_completion_length"] - position - 1, 1),
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        repetition_penalty=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=stops,
    )
    texts = {
        token: [tokenizer.decode([*before, token], skip_special_tokens=True)] * count
        for token in (drawn, other)
    }
    rolled = [token for token in (drawn, other) if token not in ends]
    if rolled:
        torch.manual_seed(seed)
        ids = torch.tensor([[*prefix, token] for token in rolled for _ in range(count)])
        ids = ids.to(model.device)
        possible = warpers(*(settings[k] for k in ("temperature", "top_p", "top_k", "min_p")))
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            logits_processor=transformers.LogitsProcessorList(possible),
        ).tolist()
        for i, token in enumerate(rolled):
            rows = [row[len(prompt) :] for row in out[i * count : (i + 1) * count]]
            texts[token] = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    kept, replaced = (sum(map(bool, judged(texts[token]))) / count for token in (drawn, other))
    return kept, replaced


@dataclass(frozen=True)
class Drawn:
    problem: Problem
    number: int  # within the problem
    prompt: list[int]
    ids: list[int]  # the end token included
    entropy: list[float]  # nats, before each token
    perplexity: float  # under the policy itself
    correct: bool

    @property
    def name(self) -> str:
        return f"{self.problem.id}/{self.number}"


def chosen_positions(entropy: Sequence[float], stream: random.Random) -> dict[str, int]:
    """Which tokens are replaced: the most uncertain one, those of the first and the last fifth
    (rounded up), and one drawn from all as a control."""
    values = np.asarray(entropy)
    end = max(1, int(np.ceil(END * len(values) - 1e-9)))
    return {
        "most uncertain": int(values.argmax()),
        "early": int(values[:end].argmax()),
        "late": len(values) - end + int(values[-end:].argmax()),
        "random": stream.randrange(len(values)),
    }


def perplexity_groups(drawn: Sequence[Drawn], count: int) -> dict[str, list[Drawn]]:
    """Up to ``count`` completions of the lowest and of the highest fifth by perplexity.

    One of each problem, the most extreme, so that completions are independent.
    """
    ranked = sorted(drawn, key=lambda one: (one.perplexity, one.name))
    end = max(1, int(np.ceil(END * len(ranked) - 1e-9)))
    found = {}
    for name, members in (("low", ranked[:end]), ("high", ranked[::-1][:end])):
        of_problem: dict[str, Drawn] = {}
        for one in members:
            of_problem.setdefault(one.problem.id, one)
        found[name] = list(of_problem.values())[:count]
    return found


@torch.no_grad()
def measure(profile: Profile, run: Run) -> dict:
    """Replace tokens in completions of a trained policy, and roll out again; the run record.

    Writes impact.csv, a row for each replaced token (docs/data_training.md).
    """
    drawer = groups.Drawer(profile, run)
    explored = profile.exploration
    seed = run.seed or profile.rl["seed"]  # each run draws anew: intervals over runs hold that, too
    record = Record("impact", profile.name, run.fingerprint, seed, dataclasses.asdict(explored))
    drawn: list[Drawn] = []
    for problem in problems.rl_problems(profile)[: explored.prompts]:
        group = drawer.draw(problem, explored.completions, seed)
        entropy, logps = groups.signals(drawer.model, group, profile.rl["temperature"])
        prompt = group.out[0, : group.start].tolist()
        for number, body in enumerate(group.bodies):
            perplexity = token_signals.perplexity(logps[number, : len(body)].cpu().numpy())
            own, correct = entropy[number, : len(body)].tolist(), group.correct[number]
            drawn.append(Drawn(problem, number, prompt, body, own, perplexity, correct))
    rows = read_lines(run.samples, repair=True)
    made = {(row["completion"], row["perplexity_group"], row["token"]) for row in rows}
    for by_perplexity, members in perplexity_groups(drawn, explored.replaced).items():
        for one in members:
            stream = sample_seed(seed, one.problem, one.number)
            positions = chosen_positions(one.entropy, random.Random(stream))
            for token, position in positions.items():
                if (one.name, by_perplexity, token) in made:
                    continue
                kept, replaced = impact(
                    drawer.model,
                    drawer.tokenizer,
                    one.prompt,
                    one.ids,
                    position,
                    explored.continuations,
                    profile.rl,
                    stream + position,
                    partial(drawer.judge, one.problem),
                )
                row: dict[str, Any] = {"problem": one.problem.id, "completion": one.name}
                row |= {"perplexity_group": by_perplexity, "perplexity": one.perplexity}
                row |= {"correct": one.correct, "token": token, "position": position}
                row |= {"tokens": len(one.ids), "entropy": one.entropy[position], "kept": kept}
                row |= {"replaced": replaced, "continuations": explored.continuations}
                append_line(run.samples, row)
                append_line(run.live_steps, {"step": len(made) + 1})
                made.add((one.name, by_perplexity, token))
    table = pd.DataFrame(read_lines(run.samples))
    write_text(run.measured / "impact.csv", table.to_csv(index=False, float_format="%.6g"))
    return run.finish(record, policy=drawer.policy.name, drawn=len(drawn))
