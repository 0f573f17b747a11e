"""Grids: which runs of which profiles make a larger study, in the order of their importance."""

import functools
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from sage_lib.errors import SageError
from sage_lib.experiment.profile import Profile, load_profile
from sage_lib.paths import GRIDS

_YAML = (".yaml", ".yml")


class Block(BaseModel):
    """Methods of a profile (or a variant of one, as in "study+rl.learning_rate=3e-4") by their
    keys and families; without any the base alone."""

    model_config = ConfigDict(extra="forbid")
    name: str
    about: str
    profile: str
    methods: list[str] = []
    families: list[str] = []
    seeds: list[int] | None = None  # None: all of the methods' seeds

    @functools.cached_property
    def settings(self) -> Profile:
        return load_profile(self.profile)

    def order(self) -> list[tuple[str, int]]:
        """(method, seed), seed by seed: a seed's runs are compared with each other."""
        every = self.settings.methods.items()
        named = [*self.methods, *(key for key, one in every if one.family in self.families)]
        own = {method: self.settings.seeds_of(method) for method in named}
        seeds = dict.fromkeys(seed for chosen in own.values() for seed in chosen)
        chosen = [seed for seed in seeds if self.seeds is None or seed in self.seeds]
        return [(method, seed) for seed in chosen for method in own if seed in own[method]]


class _Grid(BaseModel):
    blocks: list[Block]


def load_grid(name: str | Path) -> list[Block]:
    """The blocks of a grid, the most important one first: of one that comes with the companion by
    its name, or of a user's own .yaml file. SageError for what is not there or not known."""
    own = str(name).endswith(_YAML)
    path = Path(name).expanduser().resolve() if own else GRIDS / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(one.stem for one in GRIDS.glob("*.yaml")))
        raise SageError(f"there is no grid {str(name)!r}: choose one of {known}, or give a file")
    try:
        blocks = _Grid.model_validate(YAML(typ="safe").load(path.read_text())).blocks
    except (YAMLError, ValueError, RecursionError) as error:
        raise SageError(f"grid {path.name}: {' '.join(str(error).split())}") from None
    for block in blocks:
        if block.profile.split("+")[0].endswith(_YAML):
            block.profile = str(path.parent / block.profile)
        methods = block.settings.methods
        families = {method.family for method in methods.values()}
        if wrong := {*block.methods, *block.families} - {*methods, *families}:
            where = f"grid {path.name}, block {block.name}: profile {block.settings.name}"
            raise SageError(f"{where} has no method or family {min(wrong)!r}")
    return blocks
