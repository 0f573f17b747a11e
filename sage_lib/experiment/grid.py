"""Grids: which runs of which profiles make the evidence, in the order of their importance.

A grid is a YAML file of blocks. A block names a profile (or a variant of one, as in
``countdown+rl.learning_rate=3e-4``) and the methods of it that are trained; the methods, their
settings and their seeds stand in the profile, where ``vary`` makes a method for each of several
values. Runs that differ in what the base is made from are profiles of their own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from sage_lib.errors import SageError
from sage_lib.experiment.profile import Profile, load_profile
from sage_lib.paths import GRIDS


@dataclass(frozen=True)
class Block:
    """Some methods of one profile."""

    name: str
    about: str
    profile: Profile
    methods: tuple[str, ...]  # may be none: the base alone
    seeds: tuple[int, ...] | None = None  # those of the methods' seeds that are done; None is all

    def order(self) -> list[tuple[Profile, str, int]]:
        """(profile, method, seed), seed by seed: a seed's runs are compared with each other."""
        own = {method: self.profile.seeds_of(method) for method in self.methods}
        of_methods = dict.fromkeys(seed for chosen in own.values() for seed in chosen)
        seeds = [seed for seed in of_methods if self.seeds is None or seed in self.seeds]
        return [(self.profile, m, seed) for seed in seeds for m in own if seed in own[m]]


@dataclass(frozen=True)
class Grid:
    """Blocks of runs, the most important one first."""

    name: str
    about: str
    blocks: tuple[Block, ...]

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The profiles of all blocks, each once."""
        return tuple({block.profile.name: block.profile for block in self.blocks}.values())

    def block(self, name: str) -> Block:
        """SageError names the blocks that there are."""
        for block in self.blocks:
            if block.name == name:
                return block
        known = ", ".join(block.name for block in self.blocks)
        raise SageError(f"grid {self.name} has no block {name!r}: choose one of {known}")

    def order(self) -> list[tuple[Profile, str, int]]:
        """(profile, method, seed) of every RL run, block by block, each run once."""
        runs: dict[tuple[str, str, int], tuple[Profile, str, int]] = {}
        for block in self.blocks:
            for profile, method, seed in block.order():
                runs.setdefault((profile.name, method, seed), (profile, method, seed))
        return list(runs.values())


def grid_names() -> list[str]:
    """The grids that come with the companion."""
    return sorted(path.stem for path in GRIDS.glob("*.yaml"))


def load_grid(name: str | Path) -> Grid:
    """Read a grid: its name, or the path of a user's own .yaml file.

    Raises SageError for an unknown grid, unreadable YAML, an unknown or missing key, and for a
    profile, a method or a family that is not there.
    """
    path = _find(str(name))
    try:
        raw = YAML(typ="safe").load(path.read_text())
    except (YAMLError, UnicodeDecodeError, RecursionError) as error:  # too deep for a parser, too
        sentence = " ".join(str(error).split())
        raise SageError(f"grid {path.name} is not valid YAML: {sentence}") from None
    given = _section(raw, {"name", "about", "blocks"}, f"grid {path.name}")
    if given["name"] != path.stem:
        raise SageError(f"grid {path.name}: its name is {given['name']!r}, not that of its file")
    blocks = given["blocks"]
    if not isinstance(blocks, list) or not blocks:
        raise SageError(f"grid {path.name}: blocks is a list of blocks, not {blocks!r}")
    found = tuple(_block(block, path) for block in blocks)
    names = [block.name for block in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SageError(f"grid {path.name} has two blocks {twice!r}: rename one")
    return Grid(path.stem, given["about"], found)


def _find(name: str) -> Path:
    own = name.endswith((".yaml", ".yml"))
    path = Path(name).expanduser().resolve() if own else GRIDS / f"{name}.yaml"
    if not path.is_file():
        raise SageError(
            f"there is no grid {name!r}: choose one of {', '.join(grid_names())}, "
            "or give the path of a .yaml file"
        )
    return path


def _section(given: Any, keys: set[str], where: str, more: frozenset[str] = frozenset()) -> dict:
    if not isinstance(given, dict):
        raise SageError(f"{where} must be a section of named settings, not {given!r}")
    unknown, missing = sorted(set(given) - keys - more), sorted(keys - set(given))
    if unknown or missing:
        wrong = f"unknown key {unknown[0]!r}" if unknown else f"the key {missing[0]!r} is missing"
        raise SageError(f"{where}: {wrong}; keys are {', '.join(sorted(keys | more))}")
    return given


def _block(given: Any, path: Path) -> Block:
    where = f"grid {path.name}, a block"
    needed = {"name", "about", "profile"}
    block = _section(given, needed, where, frozenset({"families", "methods", "seeds"}))
    where = f"grid {path.name}, block {block['name']}"
    own = block["profile"].split("+")[0].endswith((".yaml", ".yml"))
    profile = load_profile(str(path.parent / block["profile"]) if own else block["profile"])
    for key in ("families", "methods", "seeds"):
        if not isinstance(block.get(key, []), list):
            raise SageError(f"{where}: {key} is a list, not {block[key]!r}")
    families = {method.family for method in profile.methods.values()}
    for family in block.get("families", []):
        if family not in families:
            known = ", ".join(sorted(families))
            raise SageError(f"{where}: profile {profile.name} has no family {family!r}: {known}")
    for method in block.get("methods", []):
        if method not in profile.methods:
            known = ", ".join(profile.methods)
            raise SageError(f"{where}: profile {profile.name} has no method {method!r}: {known}")
    named, seeds = block.get("methods", []), block.get("seeds")
    by_family = [key for key, m in profile.methods.items() if m.family in block.get("families", [])]
    methods = tuple(dict.fromkeys([*named, *by_family]))
    known_seeds = {seed for method in methods for seed in profile.seeds_of(method)}
    for seed in seeds or ():
        if seed not in known_seeds:
            raise SageError(f"{where}: no method of it has the seed {seed!r}")
    chosen = None if seeds is None else tuple(seeds)
    return Block(str(block["name"]), str(block["about"]), profile, methods, chosen)
