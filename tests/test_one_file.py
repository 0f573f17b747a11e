"""examples/sage_in_one_file.py against SageTrainer on the walk's tiny model."""

import ast
import importlib.util
import json
import sys

import pytest
import torch
from trainer_cases import losses, make, spread

from sage_lib.algorithm.guides import BranchGuide
from sage_lib.paths import ROOT

__all__ = ["make"]  # the fixture

pytestmark = pytest.mark.filterwarnings("ignore")
FILE = ROOT / "examples" / "sage_in_one_file.py"


@pytest.fixture(scope="module")
def one_file():
    spec = importlib.util.spec_from_file_location("sage_in_one_file", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("ratio", [0.3, 0.0])
def test_losses_and_weights_of_three_steps_are_those_of_the_trainer(make, one_file, ratio):
    guide = BranchGuide(threshold=1.2, ratio=ratio)
    trainer = make(guide, lora=False, beta=0.5, temperature=0.8)
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    seen, generate = [], trainer._generate_and_score_completions

    def seeded(inputs):
        """Both draw from the same stream."""
        seen.append(inputs[:: trainer.num_generations])
        torch.manual_seed(len(seen))
        return generate(inputs)

    trainer._generate_and_score_completions = seeded
    trainer.train()
    trained = dict(trainer.model.named_parameters())

    model = type(trainer.model)(trainer.model.config)
    model.load_state_dict(start, strict=False)
    model.tie_weights()
    settings = one_file.Settings(
        steps=3, completions=4, longest=8, learning_rate=1e-2, temperature=0.8, beta=0.5
    )
    settings.ratio = ratio
    sample = one_file.sample
    drawn = []

    def reseeded(*given):
        drawn.append(1)
        torch.manual_seed(len(drawn))
        return sample(*given)

    one_file.sample = reseeded
    try:
        tokenizer = trainer.processing_class
        reward = lambda text, answer: spread([[{"content": text}]])[0]  # noqa: E731
        log = one_file.train(model, tokenizer, seen, settings, reward)
    finally:
        one_file.sample = sample
    assert len(log) == 3 and (log[0]["q"] > 1) == (ratio > 0)
    assert [row["loss"] for row in log] == pytest.approx(losses(trainer), abs=1e-4)
    moved = max((trained[name] - p).abs().max().item() for name, p in start.items())
    apart = max((trained[name] - p).abs().max().item() for name, p in model.named_parameters())
    assert moved > 1e-2 and apart < 1e-5


def test_a_model_of_16_bits_that_penalises_repetition_is_trained_as_its_own_distribution(
    one_file, tmp_path, monkeypatch
):
    """Its folder has settings of generation, no padding token, and weights in bfloat16."""
    model, tokenizer, problems = one_file.copying()
    model.generation_config.repetition_penalty = 5.0
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    handed = {}

    def train(model, tokenizer, batches, settings):
        handed.update(model=model, tokenizer=tokenizer)
        return []

    monkeypatch.setattr(one_file, "train", train)
    one_file.main([str(tmp_path), str(tmp_path / "asked.jsonl")])
    assert handed["model"].dtype == torch.float32
    assert handed["model"].generation_config.repetition_penalty in (None, 1.0)
    assert handed["tokenizer"].pad_token == "<end>"


def test_it_is_short_and_needs_torch_and_transformers_alone():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 200
    tree = ast.parse(text)
    names = [one.module for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)]
    names += [a.name for one in ast.walk(tree) if isinstance(one, ast.Import) for a in one.names]
    outside = {name.split(".")[0] for name in names} - sys.stdlib_module_names
    assert outside == {"torch", "transformers", "tokenizers"}  # transformers brings the last


def test_it_learns_to_copy(one_file):
    torch.manual_seed(0)
    model, tokenizer, problems = one_file.copying()
    settings = one_file.Settings()
    batches = ([problems[i] for i in torch.randint(10, (8,)).tolist()] for _ in range(200))
    log = one_file.train(model, tokenizer, batches, settings)
    first, last = (sum(row["reward"] for row in part) / 10 for part in (log[:10], log[-10:]))
    assert last > first + 0.3
