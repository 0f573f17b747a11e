"""Benchmarks whose results are kept: python tools/bench.py guides

Each writes data/measured/benchmarks/<name>.csv and a record of machine, revision and versions beside it. Compare ratios,
never seconds of two runs: what is compared alternates within one process.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import pandas as pd
import torch

from sage_lib import config, embedded_model, paths, records
from sage_lib.files import write_json, write_text
from sage_lib.guides import BranchGuide, GuideInputs, IdentityGuide, RandomGuide, ShuffledGuide, TokenGuide, compose


def interleaved(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every case in each round; the cases take turns, so that a slow moment of the machine hits them all."""
    seconds = {name: [] for name in cases}
    for _ in range(rounds + 1):
        for name, run in cases.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return {name: times[1:] for name, times in seconds.items()}  # the first round warms up


def guides() -> pd.DataFrame:
    """Every guide on a (64, 2048) batch, against one forward pass of the embedded model at that shape."""
    batch, time_steps = 64, 2048
    profile = config.load("smoke")
    folder = paths.build("benchmarks") / "model"
    embedded_model.create(folder, {**profile.model.architecture, "max_position_embeddings": time_steps}, profile.task.limit, time_steps, seed=0)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(embedded_model.load_tokenizer(folder)), (batch, time_steps), generator=generator)
    inputs = GuideInputs(entropies=torch.rand(batch, time_steps, generator=generator) * 3, logps=-torch.rand(batch, time_steps, generator=generator) * 5,
                         mask=(torch.rand(batch, time_steps, generator=generator) < 0.9).long(), progress=0.3, generator=generator)
    cases = {"identity": IdentityGuide(), "branch": BranchGuide(), "random": RandomGuide(), "token (min-max)": TokenGuide(), "token (rank)": TokenGuide("rank"),
             "token (z-score)": TokenGuide("zscore"), "shuffled branch": ShuffledGuide(BranchGuide()), "branch x random": compose(BranchGuide(), RandomGuide())}
    with torch.no_grad():
        times = interleaved({"forward pass": lambda: model(ids), **{name: (lambda g=g: g(inputs)) for name, g in cases.items()}}, rounds=5)
    forward = times.pop("forward pass")
    return pd.DataFrame([{"guide": name, "seconds": statistics.median(t), "forward pass seconds": statistics.median(forward), "share": statistics.median(t) / statistics.median(forward),
                          "largest share": max(a / b for a, b in zip(t, forward, strict=True)), "rounds": len(t)} for name, t in times.items()])


BENCHMARKS = {"guides": guides}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("name", choices=BENCHMARKS)
    name = parser.parse_args().name
    table = BENCHMARKS[name]()
    folder = paths.BENCHMARKS
    write_text(folder / f"{name}.csv", table.to_csv(index=False))
    write_json(folder / f"{name}.json", {"benchmark": name, "revision": records.revision(), "versions": records.versions(), "machine": records.machine(), "threads": torch.get_num_threads()})
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
