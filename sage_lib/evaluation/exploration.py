"""Two measurements of the exploration report. Dynamics (3.2): base against trained policy, token by
token on the same completions. Impact (eq. 5-6): a token is replaced by the runner-up, both prefixes
are rolled out again and compared."""

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
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.runs import Run
from sage_lib.files import append_line, read_lines, write_text
from sage_lib.policy import loading, token_groups, token_signals
from sage_lib.policy.sampling import end_tokens, sample_seed, warpers
from sage_lib.tasks.problem import Problem

#: The share of a completion that is early, or late (exploration report, Figure 6b), and the share
#: of completions that have a low, or a high perplexity (its Figure 5b).
END = 0.2


@torch.no_grad()
def impact(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    completion: Sequence[int],
    position: int,
    count: int,
    rl: Mapping[str, Any],
    seed: int,
    are_correct: Callable[[list[str]], Sequence[bool]],
) -> tuple[float, float]:
    """Compare continuations of a token with continuations of its runner-up.

    The token stands at a position (from 0) of the completion. Prompt and completion are token ids.
    ``count`` continuations of each token are drawn, with temperature, truncations and length of
    ``rl``, which has keywords of GRPOConfig. ``are_correct`` judges texts of whole completions.

    Returns the two shares of correct completions. I_t is their difference.
    """
    before, drawn = list(completion[:position]), completion[position]
    prefix = [*prompt, *before]
    state = torch.tensor([prefix], device=model.device)
    logits = model(input_ids=state).logits[0, -1:].float().cpu().numpy()
    other = int(token_signals.runner_up(logits, np.array([drawn]))[0])
    stops = end_tokens(model, tokenizer)
    ends = stops if isinstance(stops, list) else [stops]
    config = transformers.GenerationConfig(
        do_sample=True,
        max_new_tokens=max(rl["max_completion_length"] - position - 1, 1),
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        repetition_penalty=1.0,
        pad_token_id=loading.pad_id(tokenizer),
        eos_token_id=stops,
    )
    texts = {
        token: [tokenizer.decode([*before, token], skip_special_tokens=True)] * count
        for token in (drawn, other)
    }
    continued = [token for token in (drawn, other) if token not in ends]
    if continued:
        torch.manual_seed(seed)
        starts = [[*prefix, token] for token in continued for _ in range(count)]
        ids = torch.tensor(starts, device=model.device)
        active = warpers(*(rl[k] for k in ("temperature", "top_p", "top_k", "min_p")))
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            logits_processor=transformers.LogitsProcessorList(active),
        ).tolist()
        for i, token in enumerate(continued):
            rows = [row[len(prompt) :] for row in out[i * count : (i + 1) * count]]
            texts[token] = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    original, replaced = (sum(are_correct(texts[token])) / count for token in (drawn, other))
    return original, replaced


@dataclass(frozen=True)
class DrawnCompletion:
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


def replaced_positions(entropy: Sequence[float], stream: random.Random) -> dict[str, int]:
    """Return the positions of the tokens that are replaced: the most uncertain one, the most
    uncertain of the first and of the last fifth (rounded up), and a random one as a control."""
    values = np.asarray(entropy)
    end = max(1, int(np.ceil(END * len(values) - 1e-9)))
    return {
        "most uncertain": int(values.argmax()),
        "early": int(values[:end].argmax()),
        "late": len(values) - end + int(values[-end:].argmax()),
        "random": stream.randrange(len(values)),
    }


def perplexity_groups(
    drawn: Sequence[DrawnCompletion], count: int
) -> dict[str, list[DrawnCompletion]]:
    """Return up to ``count`` completions of the lowest and of the highest fifth by perplexity.

    A problem has at most one, the most extreme, so that completions are independent.
    """
    ranked = sorted(drawn, key=lambda completion: (completion.perplexity, completion.name))
    end = max(1, int(np.ceil(END * len(ranked) - 1e-9)))
    groups_by_name = {}
    for name, members in (("low", ranked[:end]), ("high", ranked[::-1][:end])):
        by_problem: dict[str, DrawnCompletion] = {}
        for completion in members:
            by_problem.setdefault(completion.problem.id, completion)
        groups_by_name[name] = list(by_problem.values())[:count]
    return groups_by_name


def _seed(profile: Profile, run: Run) -> int:
    """Return the seed of a run's draws: each run draws anew, and intervals over runs hold that."""
    return profile.rl["seed"] if run.seed is None else run.seed


@torch.no_grad()
def measure_impact(profile: Profile, run: Run) -> dict:
    """Write impact.csv, a row for each replaced token (docs/data_training.md); return the run
    record."""
    drawer = groups.Drawer(profile, run)
    exploration = profile.exploration
    seed = _seed(profile, run)
    record = run.begin(seed, dataclasses.asdict(exploration))
    drawn: list[DrawnCompletion] = []
    for problem in problems.rl_problems(profile)[: exploration.prompts]:
        group = drawer.draw(problem, exploration.completions, seed)
        entropy, logps = groups.signals(drawer.model, group, profile.rl["temperature"])
        prompt = group.out[0, : group.start].tolist()
        for number, body in enumerate(group.bodies):
            perplexity = token_signals.perplexity(logps[number, : len(body)].cpu().numpy())
            nats, correct = entropy[number, : len(body)].tolist(), group.correct[number]
            drawn.append(DrawnCompletion(problem, number, prompt, body, nats, perplexity, correct))
    run.live_steps.unlink(missing_ok=True)  # a kill may have cut off its last line
    rows = read_lines(run.samples, repair=True)
    finished = {(row["completion"], row["perplexity_group"], row["token"]) for row in rows}
    for by_perplexity, members in perplexity_groups(drawn, exploration.replaced).items():
        for completion in members:
            stream = sample_seed(seed, completion.problem, completion.number)
            positions = replaced_positions(completion.entropy, random.Random(stream))
            for token, position in positions.items():
                if (completion.name, by_perplexity, token) in finished:
                    continue
                original, replaced = impact(
                    drawer.model,
                    drawer.tokenizer,
                    completion.prompt,
                    completion.ids,
                    position,
                    exploration.continuations,
                    profile.rl,
                    stream + position,
                    partial(drawer.are_correct, completion.problem),
                )
                row: dict[str, Any] = {"problem": completion.problem.id}
                row |= {"completion": completion.name, "perplexity_group": by_perplexity}
                row |= {"perplexity": completion.perplexity, "correct": completion.correct}
                row |= {"token": token, "position": position, "tokens": len(completion.ids)}
                row |= {"entropy": completion.entropy[position], "kept": original}
                row |= {"replaced": replaced, "continuations": exploration.continuations}
                append_line(run.samples, row)
                append_line(run.live_steps, {"step": len(finished) + 1})
                finished.add((completion.name, by_perplexity, token))
    table = pd.DataFrame(read_lines(run.samples))
    write_text(run.measured / "impact.csv", table.to_csv(index=False, float_format="%.6g"))
    return run.finish(record, policy=drawer.policy.name, drawn=len(drawn))


@torch.no_grad()
def measure_dynamics(profile: Profile, run: Run) -> dict:
    """Write tokens.csv and prompts.csv (docs/data_training.md) of completions of the base and of a
    trained policy, which both policies read; return the run record."""
    drawer = groups.Drawer(profile, run)
    base, _ = loading.load(profile.model, runs.sft_run(profile).model)
    exploration = profile.exploration
    seed = _seed(profile, run)
    sizes = {"prompts": exploration.prompts, "completions": exploration.completions}
    record = run.begin(seed, sizes)
    prompts = problems.rl_problems(profile)[: exploration.prompts]
    tables, prompt_rows = [], []
    run.live_steps.unlink(missing_ok=True)
    for source, model in (("base", base), ("policy", drawer.model)):  # whose completions
        tokens = []
        for number, problem in enumerate(prompts):
            count = exploration.completions
            group = drawer.draw(problem, count, seed, model)
            token_rows = _tokens(drawer, base, group, number * count)
            tokens.append(token_rows)
            entropy = token_rows["before" if model is base else "after"].mean()
            row = {"source": source, "problem": problem.id, "completions": count}
            prompt_rows.append({**row, "correct": sum(group.correct) / count, "entropy": entropy})
            append_line(run.live_steps, {"step": len(prompt_rows)})
        tables.append(token_groups.grouped(pd.concat(tokens)).assign(source=source))
    for name, table in (("tokens", pd.concat(tables)), ("prompts", pd.DataFrame(prompt_rows))):
        write_text(run.measured / f"{name}.csv", table.to_csv(index=False, float_format="%.6g"))
    return run.finish(record)


def _tokens(
    drawer: groups.Drawer, base: PreTrainedModel, group: groups.Group, first: int
) -> pd.DataFrame:
    """Return a row for each token of a group; ``first`` is the number of its first completion."""
    temperature = drawer.profile.rl["temperature"]
    before, logp_before = groups.signals(base, group, temperature)
    after, logp_after = groups.signals(drawer.model, group, temperature)
    columns = {"before": before, "after": after}
    columns |= {"p_before": logp_before.exp(), "p_after": logp_after.exp()}
    frames = []
    for number, (body, mask) in enumerate(zip(group.bodies, group.mask, strict=True)):
        values = {name: x[number][mask].cpu().numpy() for name, x in columns.items()}
        frame = pd.DataFrame({"kind": token_groups.kinds(drawer.tokenizer, body), **values})
        sign = "positive" if group.correct[number] else "negative"
        place = frame.index / len(frame)
        frames.append(frame.assign(completion=first + number, sign=sign, place=place))
    return pd.concat(frames, ignore_index=True)
