"""Files and locks: files are written whole, and logs line by line, so that no kill loses
results."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sage_lib.errors import SageError

#: Errors of a disk, not of the program: full, over a quota, read-only, not the user's, or a file
#: where a folder should be.
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
_DISK |= {errno.ENOTDIR, errno.EEXIST}
#: How a user makes again what is lacking. Without --resume reproduce begins anew.
AGAIN = "the same command makes it again (reproduce: with --resume)"
_REMEDY = (
    "what was made is kept: free some space or make the folder writable, or set SAGE_BUILD and "
    "SAGE_RESULTS to another disk, and the same command goes on (reproduce: with --resume)"
)
#: The error of a full disk.
FULL = f"the disk is full; {_REMEDY}"
#: Relative difference below which two results are the same: processors round differently.
SAME = 1e-8


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Turn errors of a disk that cannot be written into a SageError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK:
            raise
        name = Path(error.filename).name if isinstance(error.filename, str) else "a file"
        raise SageError(f"cannot write {name} ({error.strerror}); {_REMEDY}") from error


def is_full(folder: Path) -> bool:
    """Return whether the disk below a folder has less than a megabyte left."""
    return folder.is_dir() and shutil.disk_usage(folder).free < 1_000_000


def write_text(path: Path, text: str) -> Path:
    return write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> Path:
    """Write a temporary file beside ``path``, then rename: readers see the old file or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave a file without content
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # on a read-only disk there is no such file
            temporary.unlink(missing_ok=True)
        raise SageError(f"cannot write {path.name} ({error.strerror}); {_REMEDY}") from error
    return path


def write_json(path: Path, value: Any) -> Path:
    return write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; SageError where it is missing or damaged."""
    folder = path.parent.name
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        what = "is missing: run the stage that makes it first"
    except (ValueError, RecursionError) as error:
        what = f"is not valid JSON ({error}): delete the folder {folder}, and {AGAIN}"
    raise SageError(f"{folder}/{path.name} {what}")


def in_form(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook whose kernel is python3, whatever name JupyterLab wrote into it."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    common = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {**notebook, "metadata": {**notebook["metadata"], **common}}


def notebook_text(notebook: dict[str, Any]) -> str:
    """Return the text of a notebook's file as git has it, and as JupyterLab writes it."""
    import nbformat  # late: it takes seconds

    return f"{nbformat.writes(nbformat.from_dict(in_form(notebook)))}\n"


def weights_hash(folder: Path) -> str:
    """Return the hash (12 hex digits) of the weights of a saved model or adapter."""
    return _hash(sorted(folder.glob("*.safetensors")))


def adapter_base(folder: Path) -> Path | str | None:
    """Return the base of the adapter in a folder; None where the folder holds a whole model.

    The base is a folder, named from the adapter's or from the working directory, or a hub name.
    """
    config = folder / "adapter_config.json"
    if not config.is_file():
        return None
    name: str = read_json(config)["base_model_name_or_path"]
    folders = [path.resolve() for path in (folder / name, Path(name)) if path.is_dir()]
    return folders[0] if folders else name


def model_hash(folder: Path) -> str:
    """Return the hash (12 hex digits) of the files of a model: weights, settings and tokenizer. The
    hash of an adapter includes its base, if that is a folder."""
    files_hash = _hash(sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]))
    base = adapter_base(folder)
    return f"{files_hash}+{model_hash(base)}" if isinstance(base, Path) else files_hash


def _hash(files: Iterable[Path]) -> str:
    stats = [(path, path.stat()) for path in files]
    return _hash_once(tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats))


@functools.lru_cache
def _hash_once(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Return the hash of files. They are read again only after their size or time has changed."""
    digest = hashlib.sha256()
    for path, *_ in files:
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()[:12]


def append_line(path: Path, row: dict) -> None:
    """Append one JSON row and flush it, so that a killed run keeps every finished row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as f:
        f.write(json.dumps(row) + "\n")


def read_lines(path: Path, repair: bool = False) -> list[dict]:
    """Return the rows of a JSONL file, [] where there is none. A half-written last line, which a
    kill leaves, is left out. ``repair`` cuts it off the file, which only the writing process may
    do."""
    rows, whole_bytes = [], 0
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    for line in data.splitlines(keepends=True):
        try:
            if not line.endswith(b"\n"):
                raise ValueError
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            if whole_bytes + len(line) < len(data):
                raise SageError(
                    f"{path.parent.name}/{path.name}: line {len(rows) + 1} is not valid JSON; "
                    f"delete that line, or the file, and {AGAIN}"
                ) from None
            if repair:
                os.truncate(path, whole_bytes)
            break
        whole_bytes += len(line)
    return rows


def rewrite_lines(path: Path, rows: Iterable[dict]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


@contextlib.contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[bool]:
    """Hold a lock for the time of a ``with`` block. The kernel frees it when its holder ends.

    Yields False where another process holds it, unless ``wait``. A process must not ask for a
    lock that it holds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = True
        except (BlockingIOError, PermissionError):
            is_held = False
        except OSError as error:
            other = "set SAGE_BUILD to a folder on a disk that knows locks"
            raise SageError(f"{path.name} cannot be locked ({error.strerror}): {other}") from error
        yield is_held


def is_locked(path: Path) -> bool:
    """Return whether another process holds a lock of :func:`locked`."""
    if path.is_file():
        with locked(path) as is_free:
            return not is_free
    return False


def require_space(folder: Path, gigabytes: float, what: str) -> None:
    """Raise SageError where a disk has too little space.

    Args:
        folder: on the disk; it is made.
        gigabytes: space that must be free.
        what: the part of the work that needs it, for the error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free / 1e9
    if free < gigabytes:
        raise SageError(
            f"{what} needs about {gigabytes:.1f} GB of disk and {free:.1f} GB are free: "
            "free some space, or set SAGE_BUILD to a folder on a larger disk"
        )
