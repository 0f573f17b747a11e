"""What SageTrainer needs of TRL's and transformers' trainers beyond their documented arguments.

An upgrade that moves one of these fails here, with its name. Everything is read from source files:
on a GPU Unsloth replaces the classes themselves.
"""

import ast
import importlib.util
from pathlib import Path

import pytest

from sage_lib.paths import ROOT

#: Methods that SageTrainer overrides or calls, with their parameters after self.
METHODS = {
    "_compute_loss": "model inputs",
    "compute_loss": "model inputs return_outputs num_items_in_batch",
    "_get_per_token_logps_and_entropies": (
        "model input_ids attention_mask logits_to_keep batch_size compute_entropy compute_aux_loss "
        "pixel_values image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles "
        "image_sizes token_type_ids mm_token_type_ids image_position_ids"
    ),
    "_generate_and_score_completions": "inputs",
    "_generate": "prompts",
    "_generate_single_turn": "prompt_ids images multimodal_fields num_generations has_tool_images",
    "_calculate_rewards": "inputs prompts completions completion_ids_list",
    "_save_checkpoint": "model trial",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_load_rng_state": "checkpoint",
    "_get_train_sampler": "dataset",
    "_get_output_dir": "trial",
    "add_callback": "callback",
}
#: Attributes that it reads, none of them an argument of GRPOTrainer.
ATTRIBUTES = {
    "_entropy_bonus_enabled",
    "_metrics",
    "_step",
    "_tokenizer",
    "accelerator",
    "args",
    "aux_loss_enabled",
    "beta",
    "current_gradient_accumulation_steps",
    "importance_sampling_level",
    "is_deepspeed_enabled",
    "is_fsdp_enabled",
    "loss_type",
    "max_completion_length",
    "model",
    "multi_objective_aggregation",
    "num_generations",
    "num_iterations",
    "off_policy_mask_threshold",
    "ref_model",
    "reward_weights",
    "router_aux_loss_coef",
    "scale_rewards",
    "state",
    "temperature",
    "top_entropy_quantile",
    "train_dataset",
    "use_transformers_continuous_batching",
    "use_vllm",
}
#: Attributes of theirs that it sets: TRL asks ``ref_model`` for the reference before any adapter.
SET = {"ref_model"}
#: Settings that it reads from ``args``.
SETTINGS = {
    "cast_lm_head_to_fp32",
    "delta",
    "disable_dropout",
    "gradient_accumulation_steps",
    "per_device_train_batch_size",
    "save_strategy",
    "seed",
    "should_save",
    "steps_per_generation",
    "sync_ref_model",
    "use_bias_correction_kl",
    "use_liger_kernel",
}
#: What the anchor shapes.
REFERENCE = "ref_per_token_logps"
#: Tensors that it reads from a batch, or puts there.
TENSORS = {
    "advantages",
    "completion_ids",
    "completion_mask",
    "num_items_in_batch",
    "old_per_token_logps",
    "prompt_ids",
    "prompt_mask",
    REFERENCE,
    "tool_mask",
}


def source(library: str, *path: str) -> ast.Module:
    spec = importlib.util.find_spec(library)
    return ast.parse(Path(spec.origin).parent.joinpath(*path).read_text())


def class_in(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)


def methods_of(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}


def on_self(node: ast.AST, of: type = ast.expr_context) -> set[str]:
    """Names of attributes of ``self`` and ``super()`` in ``node``: all, or those stored alone."""
    found = set()
    for n in ast.walk(node):
        if not isinstance(n, ast.Attribute) or not isinstance(n.ctx, of):
            continue
        owner = n.value.func if isinstance(n.value, ast.Call) else n.value
        if isinstance(owner, ast.Name) and owner.id in ("self", "super"):
            found.add(n.attr)
    return found


def fields_of(node: ast.ClassDef) -> set[str]:
    return {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}


ALGORITHM = ROOT / "sage_lib" / "algorithm"
OURS = class_in(ast.parse((ALGORITHM / "trainer.py").read_text()), "SageTrainer")
GRPO = class_in(source("trl", "trainer", "grpo_trainer.py"), "GRPOTrainer")
#: From the nearest class to the farthest, as Python looks a member up.
THEIRS = (
    GRPO,
    class_in(source("trl", "trainer", "base_trainer.py"), "_BaseTrainer"),
    class_in(source("transformers", "trainer.py"), "Trainer"),
)
CONFIGS = (
    class_in(source("trl", "trainer", "grpo_config.py"), "GRPOConfig"),
    class_in(source("trl", "trainer", "base_config.py"), "_BaseConfig"),
    class_in(source("transformers", "training_args.py"), "TrainingArguments"),
)
THEIR_METHODS = {name for node in THEIRS for name in methods_of(node)}
THEIR_ATTRIBUTES = set().union(*(on_self(node, ast.Store) for node in THEIRS))
OUR_ATTRIBUTES = (on_self(OURS, ast.Store) - SET) | set(methods_of(OURS)) - THEIR_METHODS


@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_what_it_took(name):
    found = [methods_of(node)[name] for node in THEIRS if name in methods_of(node)]
    assert found, f"{name} is gone from TRL's and transformers' trainers"
    given = [a.arg for a in (*found[0].args.args, *found[0].args.kwonlyargs)]
    assert given == ["self", *METHODS[name].split()], f"{name} takes other arguments"


@pytest.mark.parametrize("name", sorted(ATTRIBUTES))
def test_an_attribute_is_still_set(name):
    assert name in THEIR_ATTRIBUTES, f"TRL's and transformers' trainers set no {name} any more"


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_setting_is_still_there(name):
    known = set().union(*(fields_of(node) | set(methods_of(node)) for node in CONFIGS))
    assert name in known, f"GRPOConfig has no {name} any more"


@pytest.mark.parametrize("name", sorted(TENSORS))
def test_a_tensor_of_the_batch_still_has_its_name(name):
    used = (n.value for n in ast.walk(GRPO) if isinstance(n, ast.Constant))
    assert name in used, f"TRL's trainer knows no {name} any more"


def test_the_lists_are_what_the_trainer_uses():
    borrowed = on_self(OURS) - OUR_ATTRIBUTES | set(methods_of(OURS)) & THEIR_METHODS
    listed = set(METHODS) | ATTRIBUTES
    assert borrowed - {"__init__"} == listed


def test_the_settings_are_what_the_trainer_reads():
    read = set()
    for n in ast.walk(OURS):
        if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self.args":
            read.add(n.attr)
    assert read == SETTINGS


def test_the_tensors_are_what_the_algorithm_reads():
    read = set()
    for module in ("trainer", "batches"):
        for n in ast.walk(ast.parse((ALGORITHM / f"{module}.py").read_text())):
            if isinstance(n, ast.Subscript) and ast.unparse(n.value).endswith(("batch", "inputs")):
                read.add(n.slice.value if isinstance(n.slice, ast.Constant) else None)
    assert read - {None} == TENSORS


def test_none_of_our_members_hides_one_of_theirs():
    assert not OUR_ATTRIBUTES & (THEIR_ATTRIBUTES | THEIR_METHODS)
    assert on_self(OURS, ast.Store) >= SET


def test_trls_loss_reads_the_reference_once_and_after_its_forward_pass():
    """All that shaping the anchor rests on; the canary sees it at run time."""
    body = methods_of(GRPO)["_compute_loss"]
    reads = [n for n in ast.walk(body) if isinstance(n, ast.Constant) and n.value == REFERENCE]
    assert len(reads) == 1
    passes = [
        n
        for n in ast.walk(body)
        if isinstance(n, ast.Attribute) and n.attr == "_get_per_token_logps_and_entropies"
    ]
    assert len(passes) == 1 and passes[0].lineno < reads[0].lineno


def test_trls_forward_pass_returns_log_probabilities_then_entropies():
    scoring = methods_of(GRPO)["_get_per_token_logps_and_entropies"]
    (returned,) = (n for n in ast.walk(scoring) if isinstance(n, ast.Return))
    assert ast.unparse(returned).startswith("return (logps, entropies, ")


def test_trl_scores_the_last_tokens_asked_for_given_after_model_ids_and_mask():
    """So the reference's states are had without its head's work on them."""
    scoring = methods_of(GRPO)["_get_per_token_logps_and_entropies"]
    names = [argument.arg for argument in scoring.args.args]
    assert names[:5] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]
    uses = [n for n in ast.walk(scoring) if isinstance(n, ast.Name) and n.id == names[4]]
    body = ast.unparse(scoring)
    assert "labels[:, :-logits_to_keep] = -100" in body
    assert len(uses) == body.count("-logits_to_keep"), "nothing else depends on it"


def test_trl_logs_its_kl_under_the_name_that_the_canary_reads():
    assert "self._metrics[mode]['kl'].append(" in ast.unparse(methods_of(GRPO)["_compute_loss"])
