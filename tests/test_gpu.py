"""What only a GPU can show: make test-gpu. SageTrainer on Unsloth's own trainer, and a short run of
a pretrained model."""

import json
import os
import time

import pytest
import torch
from datasets import Dataset

from sage_lib.algorithm.guides import BranchGuide
from sage_lib.policy import tiny_qwen
from sage_lib.tasks import prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture
def make(tiny_model, tmp_path):
    from sage_lib.algorithm.backend import FastLanguageModel, GRPOConfig
    from sage_lib.algorithm.trainer import SageTrainer

    def trainer(guide, **settings):
        model, _ = FastLanguageModel.from_pretrained(
            str(tiny_model), max_seq_length=64, load_in_4bit=False, dtype=torch.bfloat16
        )
        model = FastLanguageModel.get_peft_model(
            model,
            r=8,
            lora_alpha=16,
            lora_dropout=0,
            bias="none",
            target_modules=["q_proj", "v_proj"],
            random_state=0,
        )
        rows = [{"prompt": prompts.messages(f"reach {n} from 1 2 3 4")} for n in range(8)]
        config = {
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 8,
            "beta": 0.05,
            "learning_rate": 1e-2,
            "max_steps": 3,
            "bf16": True,
            "report_to": "none",
            "logging_steps": 1,
            "save_strategy": "no",
            "use_bias_correction_kl": False,
            "loss_type": "grpo",
            "seed": 5,
            "disable_tqdm": True,
        }
        return SageTrainer(
            model=model,
            processing_class=tiny_qwen.load_tokenizer(tiny_model),
            train_dataset=Dataset.from_list(rows),
            guide=guide,
            reward_funcs=lambda completions, **_: [
                len(c[0]["content"]) % 7 / 7 for c in completions
            ],
            args=GRPOConfig(**config | settings),
        )

    return trainer


def test_a_guide_reaches_unsloths_loss_as_it_reaches_trls(make):
    """One batch with log q in the reference: its loss again from the logits."""
    trainer = make(BranchGuide(threshold=0.5, ratio=0.4))
    assert trainer._seam == "scoring"
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._prepare_inputs([trainer.train_dataset[i // 4] for i in range(8)])
    loss = trainer.compute_loss(trainer.model, batch).float()
    drawn, mask = batch["completion_ids"], batch["completion_mask"].float()
    ids = torch.cat([batch["prompt_ids"], drawn], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, attention_mask=attention).logits
    log_pi = logits[:, -drawn.shape[1] - 1 : -1].float().log_softmax(-1)
    logps = log_pi.gather(-1, drawn[..., None])[..., 0]
    d = batch["ref_per_token_logps"].float() - logps
    token = -batch["advantages"].float()[:, None] + 0.05 * (d.exp() - d - 1)
    expected = ((token * mask).sum(1) / mask.sum(1)).mean()
    assert loss.item() == pytest.approx(expected.item(), abs=2e-3)
    metrics = trainer._metrics["train"]
    assert metrics["kl"][-1] > 10 * metrics["kl_ref"][-1], "the KL is the one to the shaped anchor"


def test_a_run_on_unsloths_trainer_starts_at_its_reference(make):
    from sage_lib.algorithm.trainer import START_KL

    trainer = make(BranchGuide(threshold=0.5))
    added = [one for name, one in trainer.model.named_parameters() if "lora_B" in name]
    assert added and not any(one.any() for one in added), "the adapter adds nothing yet"
    trainer.train()
    first = trainer.state.log_history[0]["kl_ref"]
    assert 0 <= first < START_KL, "more than two passes in bfloat16 differ by"


@pytest.mark.skipif(
    "SAGE_GPU_MODEL" not in os.environ,
    reason="SAGE_GPU_MODEL names a local folder with a small pretrained model",
)
def test_a_short_branch_run_of_a_pretrained_model(tmp_path):
    from sage_lib.algorithm.backend import FastLanguageModel, GRPOConfig
    from sage_lib.algorithm.trainer import SageTrainer

    model, tokenizer = FastLanguageModel.from_pretrained(
        os.environ["SAGE_GPU_MODEL"], max_seq_length=1024, load_in_4bit=False, dtype=torch.bfloat16
    )
    model = FastLanguageModel.get_peft_model(
        model, r=8, lora_alpha=16, lora_dropout=0, bias="none", random_state=0
    )
    rows = [
        {"prompt": prompts.messages(f"What is {a} plus {b}?"), "answer": str(a + b)}
        for a in range(8)
        for b in range(8)
    ]
    trainer = SageTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        guide=BranchGuide(),
        reward_funcs=lambda completions, answer, **_: [
            float(a in c[0]["content"]) for c, a in zip(completions, answer, strict=True)
        ],
        args=GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=128,
            beta=0.05,
            learning_rate=5e-6,
            max_steps=10,
            bf16=True,
            use_bias_correction_kl=False,
            loss_type="grpo",
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            seed=5,
            disable_tqdm=True,
        ),
    )
    started = time.perf_counter()
    trainer.train()
    log = trainer.state.log_history
    print(
        json.dumps(
            {
                "seconds a step": (time.perf_counter() - started) / 10,
                "peak GB": torch.cuda.max_memory_allocated() / 1e9,
                "kl": [r.get("kl") for r in log],
                "q": [r.get("guide/mean") for r in log],
            }
        )
    )
    assert all(r["guide/mean"] >= 1 for r in log if "guide/mean" in r)
