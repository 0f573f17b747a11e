"""Base against trained policy, token by token on the same completions of RL's prompts (exploration
report, 3.2)."""

import pandas as pd
import torch
from transformers import PreTrainedModel

from sage_lib.evaluation import groups
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.runs import Run
from sage_lib.files import append_line, write_text
from sage_lib.policy import loading, token_groups

BASE, POLICY = "base", "policy"  # whose completions


@torch.no_grad()
def measure_dynamics(profile: Profile, run: Run) -> dict:
    """Read completions of the base and of a trained policy under both; return the run record.

    The run's files are tokens.csv and prompts.csv (docs/data_training.md).
    """
    drawer = groups.Drawer(profile, run)
    base, _ = loading.load(profile.model, runs.sft_run(profile).model)
    exploration = profile.exploration
    seed = run.seed or profile.rl["seed"]  # each run draws anew: intervals over runs hold that, too
    sizes = {"prompts": exploration.prompts, "completions": exploration.completions}
    record = run.begin(seed, sizes)
    prompts = problems.rl_problems(profile)[: exploration.prompts]
    tables, prompt_rows = [], []
    run.live_steps.unlink(missing_ok=True)
    for source, model in ((BASE, base), (POLICY, drawer.model)):
        tokens = []
        for number, problem in enumerate(prompts):
            count = exploration.completions
            group = drawer.draw(problem, count, seed, model)
            token_rows = _tokens(drawer, base, group, number * count)
            tokens.append(token_rows)
            entropy = token_rows["before" if source == BASE else "after"].mean()
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
