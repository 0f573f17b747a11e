"""What SageTrainer needs of TRL's and transformers' trainers beyond their documented arguments is
still there. Everything is read from source files: on a GPU Unsloth replaces the classes themselves.
"""

import ast
import importlib.util
from pathlib import Path

from sage_lib.paths import ROOT

#: What the anchor shapes, and the other tensors that are read from a batch, or put there.
REFERENCE = "ref_per_token_logps"
TENSORS = {"advantages", "completion_ids", "completion_mask", "num_items_in_batch", REFERENCE}
TENSORS |= {"old_per_token_logps", "prompt_ids", "prompt_mask", "tool_mask"}


def source(library: str, *path: str) -> ast.Module:
    spec = importlib.util.find_spec(library)
    return ast.parse(Path(spec.origin).parent.joinpath(*path).read_text())


def class_in(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)


def methods_of(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}


def attributes(node: ast.AST, *owners: str, of: type = ast.expr_context) -> set[str]:
    """Names of attributes of ``owners`` in ``node``, such as "self": all, or those stored alone."""
    found = set()
    for n in ast.walk(node):
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, of):
            owner = n.value.func if isinstance(n.value, ast.Call) else n.value
            if ast.unparse(owner) in owners:
                found.add(n.attr)
    return found


def module(name: str) -> ast.Module:
    return ast.parse((ROOT / "sage_lib" / "algorithm" / f"{name}.py").read_text())


#: The classes that SageTrainer is made of.
OURS = [
    class_in(module("trainer"), "SageTrainer"),
    class_in(module("rollouts"), "Rollouts"),
    class_in(module("unsloth_seam"), "ShapedAtScoring"),
    class_in(module("checkpoints"), "Checkpoints"),
]
#: Modules that take one as ``trainer``, and its members that mypy lets them read.
COLLABORATORS = [
    module(name) for name in ("checks", "dynamic_sampling", "merging", "kl_forms", "advantages")
]
PROTOCOL = class_in(module("guided_trainer"), "GuidedTrainer")
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
THEIR_ATTRIBUTES = set().union(*(attributes(node, "self", of=ast.Store) for node in THEIRS))
#: Theirs that are set: TRL asks ``ref_model`` for the reference before any adapter, and ``args`` is
#: a copy, so that the caller's stay as they are.
OUR_OWN = set().union(*(attributes(c, "self", of=ast.Store) | set(methods_of(c)) for c in OURS))
OUR_OWN -= {"ref_model", "args", *THEIR_METHODS}


def test_what_is_borrowed_is_still_there_and_none_of_ours_hides_theirs():
    used = set().union(*(attributes(node, "self", "super") for node in OURS))
    used |= {n.target.id for n in PROTOCOL.body if isinstance(n, ast.AnnAssign)}
    used |= set(methods_of(PROTOCOL))
    assert {"_step", "_metrics", "_compute_loss", "reward_weights", "scale_rewards"} <= used
    assert used - OUR_OWN - {"__init__"} <= THEIR_METHODS | THEIR_ATTRIBUTES
    readers = (*OURS, *COLLABORATORS)
    settings = set().union(*(attributes(n, "self.args", "trainer.args") for n in readers))
    fields = {n.target.id for c in CONFIGS for n in c.body if isinstance(n, ast.AnnAssign)}
    assert "seed" in settings <= fields | set().union(*(methods_of(c) for c in CONFIGS))
    constants = {n.value for n in ast.walk(GRPO) if isinstance(n, ast.Constant)}
    assert constants >= TENSORS
    assert not OUR_OWN & (THEIR_ATTRIBUTES | THEIR_METHODS)


def test_trls_loss_reads_the_reference_once_and_after_its_forward_pass():
    """All that shaping the anchor rests on; the canary sees it at run time."""
    body = methods_of(GRPO)["_compute_loss"]
    reads = [n for n in ast.walk(body) if isinstance(n, ast.Constant) and n.value == REFERENCE]
    assert len(reads) == 1
    members = [n for n in ast.walk(body) if isinstance(n, ast.Attribute)]
    passes = [n for n in members if n.attr == "_get_per_token_logps_and_entropies"]
    assert len(passes) == 1 and passes[0].lineno < reads[0].lineno
    assert "self._metrics[mode]['kl'].append(" in ast.unparse(body), "the canary reads it there"
    assert not any("liger" in name for name in methods_of(GRPO)), "no second loss passes by it"
    scoring = methods_of(GRPO)["_get_per_token_logps_and_entropies"]
    (returned,) = (n for n in ast.walk(scoring) if isinstance(n, ast.Return))
    assert ast.unparse(returned).startswith("return (logps, entropies, ")
