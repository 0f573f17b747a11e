"""Nothing that a user gives is unpickled: a pickle that would make a folder is planted wherever a
file can be given, and neither makes it nor ends in more than a sentence."""

import json
import os
import pickle
import shutil

import pytest
import torch
from test_trainer import make, saved, trained

from sage_lib.errors import SageError
from sage_lib.experiment.blocks import load_grid
from sage_lib.experiment.profile import Model, load_profile
from sage_lib.policy import loading
from sage_lib.tasks.table import make_task
from sage_lib.training.callbacks import WHOLE, train_on

__all__ = ["make"]  # the fixture

pytestmark = pytest.mark.filterwarnings("ignore")


class Bomb:
    """Makes a folder as it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path):
    """The folder that a bomb makes; it must not be there in the end."""
    path = tmp_path / "went off"
    yield path
    assert not path.exists(), "a pickle that a user gave was loaded"


def test_the_bomb_goes_off_where_it_is_unpickled(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "mark")))
    assert (tmp_path / "mark").is_dir()


@pytest.fixture
def pickled(tiny_model, tmp_path, mark):
    """A model's folder whose weights are such a pickle."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "model.safetensors").unlink()
    torch.save(Bomb(mark), folder / "pytorch_model.bin")
    return folder


def test_no_loader_of_models_reads_pickled_weights(pickled, tmp_path):
    from sage_lib.training.models import load_model

    with pytest.raises(SageError, match=r"holds no .safetensors file: save"):
        loading.starting_point(Model(str(pickled), 64, seed=0), tmp_path)
    profile = load_profile("smoke")
    with pytest.raises(OSError, match="safetensors"):
        loading.load(profile.model, pickled)
    for by_unsloth in (False, True):
        with pytest.raises(OSError, match="safetensors"):
            load_model(profile, pickled, True, False, by_unsloth=by_unsloth)


def test_code_beside_a_model_is_not_run(tiny_model, tmp_path, mark):
    from sage_lib.training.models import load_model

    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    profile = load_profile("smoke")
    models = [load_model(profile, folder, True, False, one)[0] for one in (False, True)]
    for model in (loading.load(profile.model, folder)[0], *models):
        assert type(model).__name__ == "Qwen2ForCausalLM"


#: A run whose checkpoint has every file that one can have on one processor.
MOVING = {"lora": False, "sync_ref_model": True, "ref_model_sync_steps": 1}


@pytest.fixture(scope="module")
def run(make, tmp_path_factory):
    """Folder of a run's checkpoint after its first step of two."""
    folder = tmp_path_factory.mktemp("checkpoints")
    trained(make(None, **saved(folder, max_steps=2, save_steps=1), **MOVING))
    shutil.rmtree(folder / "checkpoint-2")
    (folder / "checkpoint-1" / WHOLE).write_text('{"files": {}, "logs": {}}')
    return folder


#: What torch, and not a parser of text or of safetensors, reads of a checkpoint.
READ = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "sage_state_0.pt", "sage_reference.pt"}


@pytest.mark.parametrize("name", sorted({*READ, "pytorch_model.bin"}))
def test_a_pickle_in_a_checkpoint_is_refused(make, run, tmp_path, mark, name):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    checkpoint = folder / "checkpoint-1"
    if name == "pytorch_model.bin":
        (checkpoint / "model.safetensors").unlink()
    torch.save(Bomb(mark), checkpoint / name)
    with pytest.raises(SageError, match=r"checkpoint-1 holds what no run writes there"):
        train_on(make(None, **saved(folder, max_steps=2), **MOVING), folder)


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.csv", "mine.pkl"])
def test_a_data_file_that_is_a_pickle_is_refused(tmp_path, mark, name):
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(SageError, match=name):
        make_task("file", {"path": name}, {}, tmp_path).problems(1, 0)


@pytest.mark.parametrize("read", [load_profile, load_grid])
def test_yaml_that_asks_for_a_call_makes_none(tmp_path, mark, read):
    path = tmp_path / "mine.yaml"
    call = f"!!python/object/apply:os.mkdir [{str(mark)!r}]"
    path.write_text(f"name: mine\nextends: smoke\nabout: {call}\ndescription: {call}\n")
    with pytest.raises(SageError):
        read(str(path))
