"""Shared fixtures: a tiny saved model for trainer tests, a machine without network, and nothing
that touches the checkout's own data."""

import gc
import sys

import pytest

#: The longest files (half a minute and more), which come first: no worker is left with one of them
#: when the others have nothing more to do.
LONGEST = (
    *("pipeline", "distributed", "publish", "trainer", "trl_cases", "verifier"),
    *("grid", "rft", "reproduce", "stages", "pages", "notebooks"),
)
#: How many modules there were when the objects there were last set aside.
_seen = 0


def pytest_collection_modifyitems(items):
    place = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_runtest_setup():
    """Set what libraries were loaded with aside from the collection of garbage: every training
    run collects, and would look through a million objects that stay each time."""
    global _seen
    if len(sys.modules) > _seen + 100:
        gc.collect()
        gc.freeze()
        _seen = len(sys.modules)


def _work_below(folder, patch):
    """Builds and results of this process, and of those that it starts, lie in a folder."""
    patch.setenv("SAGE_BUILD", str(folder / "build"))
    patch.setenv("SAGE_RESULTS", str(folder))
    return folder


@pytest.fixture
def work_folder(tmp_path, monkeypatch):
    """The folder of a test's builds and results."""
    return _work_below(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def module_folder(tmp_path_factory):
    """The folder of builds and results that the tests of a file share."""
    with pytest.MonkeyPatch.context() as patch:
        yield _work_below(tmp_path_factory.mktemp("work"), patch)


@pytest.fixture
def variant(tmp_path):
    """A profile of a user's own: (lines of YAML) -> the path that load_profile takes."""

    def write(lines="", name="mine", extends="smoke"):
        path = tmp_path / f"{name}.yaml"
        below = f"extends: {extends}\n" if extends else ""
        path.write_text(f'name: "{name}"\n{below}{lines}\n')
        return path

    return write


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Public data can neither be read from a folder nor be fetched."""
    import datasets

    from sage_lib.tasks import public_sets

    def no_network(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setenv("SAGE_DATA", str(tmp_path))
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path))
    monkeypatch.setattr(public_sets, "urlopen", no_network)
    monkeypatch.setattr(datasets, "load_dataset", no_network)


@pytest.fixture(scope="module")
def verifier():
    """A verifier with one process, which the tests of a file share."""
    from sage_lib.tasks.verifier import Verifier

    shared = Verifier()
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Folder of a one-layer random model with the word-level tokenizer of countdown."""
    from sage_lib.experiment.profile import Model
    from sage_lib.policy import tiny_qwen

    folder = tmp_path_factory.mktemp("tiny")
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = Model(tiny_qwen.NAME, 64, seed=0, architecture=shape, largest_number=99)
    tiny_qwen.create(folder, model)
    return folder
