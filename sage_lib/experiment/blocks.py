"""Grids: which runs of which profiles make a larger study, in the order of their importance."""

import functools
import itertools
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sage_lib.errors import SageError
from sage_lib.experiment.profile import (
    NOT_YAML,
    YAML_ENDINGS,
    Profile,
    find,
    load_profile,
    parse_yaml,
)
from sage_lib.paths import GRIDS
from sage_lib.validation import refusal


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
    def loaded(self) -> Profile:
        return load_profile(self.profile)

    def order(self) -> list[tuple[str, int]]:
        """Return (method, seed) pairs, seed by seed: a seed's runs are compared with each other."""
        methods = self.loaded.methods.items()
        named = [*self.methods, *(key for key, row in methods if row.family in self.families)]
        seeds_of = {key: self.loaded.seeds_of(key) for key in named}
        seeds = dict.fromkeys(itertools.chain(*seeds_of.values()))
        limited = [seed for seed in seeds if self.seeds is None or seed in self.seeds]
        return [(key, seed) for seed in limited for key in seeds_of if seed in seeds_of[key]]


class _Grid(BaseModel):
    blocks: list[Block] = Field(min_length=1)


def load_grid(name: str | Path) -> list[Block]:
    """Load the blocks of a grid, the most important first, by the grid's name or from a user's
    .yaml file. Raises SageError for an unknown grid, profile or method."""
    path = find(str(name), Path.cwd(), GRIDS, "grid")
    try:
        blocks = _Grid.model_validate(parse_yaml(path.read_text())).blocks
    except ValidationError as error:
        raise refusal(error, f"grid {path.name}") from None
    except NOT_YAML as error:
        raise SageError(f"grid {path.name}: {' '.join(str(error).split())}") from None
    names = [block.name for block in blocks]
    if twice := [name for place, name in enumerate(names) if name in names[:place]]:
        raise SageError(f"grid {path.name} has two blocks {twice[0]!r}: give each its own name")
    for block in blocks:
        if block.profile.split("+")[0].endswith(YAML_ENDINGS):
            block.profile = str(path.parent / block.profile)
        methods = block.loaded.methods
        families = {method.family for method in methods.values()}
        if wrong := {*block.methods} - {*methods} | {*block.families} - families:
            where = f"grid {path.name}, block {block.name}: profile {block.loaded.name}"
            raise SageError(f"{where} has no method or family {min(wrong)!r}")
    return blocks
