"""Checkpoints of a SageTrainer: random streams and reference, which transformers does not keep."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

# First: Unsloth, where it is needed, comes before what it patches.
from sage_lib.algorithm.backend import GRPOTrainer

# isort: split

import torch
from peft import PeftModel
from torch.utils.data import Sampler
from transformers import TrainerCallback

from sage_lib.algorithm.guided_trainer import is_sharded
from sage_lib.errors import SageError

#: File of a checkpoint with the reference's weights, where ``sync_ref_model`` moves them.
MOVED_REFERENCE = "sage_reference.pt"


def _restore_on_processor(storage: Any, location: str) -> Any:
    """Read storage of "cpu:0", as accelerate calls the processor; torch.load knows "cpu" alone."""
    return storage if re.fullmatch(r"cpu:\d+", location) else None


torch.serialization.register_package(11, lambda storage: None, _restore_on_processor)


def is_of_reference(name: str) -> bool:
    """Return whether a parameter is of "ref", TRL's copy of the adapter before the first step."""
    return ".ref." in name


class Checkpoints(GRPOTrainer):  # type: ignore[misc]
    """Trainer that keeps random streams and the reference, and compares base and reference."""

    def _hash_base(self) -> str:
        """Return a hash of the weights that training never changes: of the reference model, and
        frozen ones of the policy without the adapter "ref"."""
        frozen = [(n, p) for n, p in self.model.named_parameters() if not p.requires_grad]
        unchanging = [(n, p) for n, p in frozen if not is_of_reference(n)]
        if self.ref_model is not None:
            unchanging += [(f"reference.{n}", p) for n, p in self.ref_model.named_parameters()]
        return self._digest(unchanging)

    def _ref_hash(self) -> str:
        """Return a hash of the base and of the reference's adapter."""
        weights = self.model.named_parameters()
        return f"{self._base_hash}-{self._digest((n, p) for n, p in weights if is_of_reference(n))}"

    def _digest(self, weights: Iterable[tuple[str, torch.Tensor]]) -> str:
        """Return a hash of names, types, shapes and bytes; "" where weights are sharded."""
        if is_sharded(self):
            return ""
        digest = hashlib.sha256()
        for name, weight in weights:
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
            as_bytes = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(as_bytes.numpy().data)
        return digest.hexdigest()[:12]

    def _streams(self) -> dict[str, torch.Generator]:
        return {
            "guide": self.guide_generator,
            "prompts": self.prompt_generator,
            "advantages": self.advantage_generator,
        }

    def _state_file(self, folder: str | Path) -> Path:
        return Path(folder, f"sage_state_{self.accelerator.process_index}.pt")

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        state: dict[str, Any] = {n: stream.get_state() for n, stream in self._streams().items()}
        if hasattr(self.guide, "state_dict"):
            state["guide_state"] = self.guide.state_dict()
        folder.mkdir(parents=True, exist_ok=True)  # which other processes may not have made yet
        torch.save({**state, "reference": self._ref_hash()}, self._state_file(folder))
        try:
            torch.load(self._state_file(folder), weights_only=True)
        except UnpicklingError as error:
            raise SageError(
                "no run could resume from the guide's state_dict(): it may hold tensors, plain "
                "numbers and texts alone, in dicts and lists"
            ) from error
        if self.args.sync_ref_model and self.args.should_save:
            moved = self.accelerator.unwrap_model(self.ref_model).state_dict()
            torch.save(moved, folder / MOVED_REFERENCE)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: torch.nn.Module | None = None
    ) -> None:
        """Load as transformers does; then the reference where it moves, and the trained adapter.

        transformers 5.17 does not look for an adapter where there is another, "ref".
        """
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        folder = Path(resume_from_checkpoint)
        if self.args.sync_ref_model:
            if not (folder / MOVED_REFERENCE).is_file():
                raise SageError(
                    f"{folder} has no {MOVED_REFERENCE}, the reference that sync_ref_model had "
                    "moved: start a new run"
                )
            moved = torch.load(folder / MOVED_REFERENCE, map_location="cpu", weights_only=True)
            self.accelerator.unwrap_model(self.ref_model).load_state_dict(moved)
        model = self.model if model is None else model
        trained = (folder / "adapter_model.safetensors").is_file()
        if isinstance(model, PeftModel) and trained and len(model.peft_config) > 1:
            active = model.active_adapters[0]
            model.load_adapter(resume_from_checkpoint, active, is_trainable=True)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if not checkpoint or not self._state_file(checkpoint).is_file():
            return
        state = torch.load(self._state_file(checkpoint), weights_only=True)
        for name, stream in self._streams().items():
            stream.set_state(state[name])
        if "guide_state" in state and hasattr(self.guide, "load_state_dict"):
            self.guide.load_state_dict(state["guide_state"])
        if state["reference"] != self._ref_hash():
            raise SageError(
                "the base model or reference policy is not the one that this run started with: "
                "resume with the same SFT model and adapter settings, or start a new run"
            )

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        if not getattr(sampler, "shuffle", False):
            return sampler
        return EpochOrder(sampler, lambda: int(self.state.epoch or 0))


class EpochOrder(Sampler[int]):
    """TRL's shuffled order of prompts, which is the same after a resume in a later epoch.

    TRL's sampler shuffles from a stream that no checkpoint keeps, and would give a resumed run the
    order of the first epoch. Here the epochs that are over (``epoch()``) are drawn first.
    """

    def __init__(self, sampler: Any, epoch: Callable[[], int]):
        self.sampler, self.epoch = sampler, epoch

    def __iter__(self) -> Iterator[int]:
        stream = self.sampler.generator
        stream.manual_seed(self.sampler.seed)
        for _ in range(self.epoch()):
            torch.randperm(self.sampler.num_samples, generator=stream)
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)


class ReferenceReset(TrainerCallback):  # type: ignore[misc]
    """ProRL's reference reset (Liu et al. 2025, arXiv 2505.24864) for a policy that is an adapter.

    Every ``steps`` steps the adapter "ref" becomes the trained one, and the optimiser's moments are
    forgotten. Batches that were scored before keep the reference that scored them.
    """

    def __init__(self, steps: int):
        self.steps = steps

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.steps != 0:
            return
        weights = dict(kwargs["model"].named_parameters())
        for name, ref_weight in weights.items():
            if is_of_reference(name):
                ref_weight.copy_(weights[name.replace(".ref.", ".default.")])
        kwargs["optimizer"].state.clear()
