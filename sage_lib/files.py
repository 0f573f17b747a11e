"""Writing so that nothing already made is lost: whole files appear at once, logs grow a line at a
time."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sage_lib.errors import SageError

#: Errors of a disk, not of the program: full, over a quota, read-only, or not the user's.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)
#: A disk with fewer bytes free is full: what could not be written is larger.
_FULL = 1_000_000
#: Numbers of a table that agree to this relative difference are the same: the sum of the same
#: numbers has other last digits on another processor, and more so where it cancels.
SAME = 1e-8


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Have a disk that cannot be written said in a sentence, whoever wrote to it."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK:
            raise
        name = Path(error.filename).name if isinstance(error.filename, str) else "a file"
        raise SageError(f"cannot write {name} ({error.strerror}); {_REMEDY}") from error


def is_full(folder: Path) -> bool:
    """Whether the disk below a folder has no room left."""
    return folder.is_dir() and shutil.disk_usage(folder).free < _FULL


#: What to do about a disk that cannot be written.
_REMEDY = (
    "what was made is kept: free some space or make the folder writable, or set SAGE_BUILD and "
    "SAGE_RESULTS to another disk, and go on with --resume"
)
#: What to say where :func:`is_full`.
FULL = f"the disk is full; {_REMEDY}"


def write_text(path: Path, text: str) -> Path:
    """Write a temporary file beside ``path``, then rename: readers see the old text or the new,
    never a part."""
    return write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> Path:
    """As :func:`write_text`, for bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # a disk that is read-only has none
            temporary.unlink(missing_ok=True)
        raise SageError(f"cannot write {path.name} ({error.strerror}); {_REMEDY}") from error
    return path


def write_json(path: Path, value: Any) -> Path:
    return write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; SageError when it is not there or not whole."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise SageError(
            f"{path.name} is missing from {path.parent.name}/: run the stage that makes it first"
        ) from None
    except (ValueError, RecursionError) as error:
        raise SageError(
            f"{path.parent.name}/{path.name} is not valid JSON ({error}): delete the folder "
            f"{path.parent.name} and run with --resume to make it again"
        ) from None


def in_form(notebook: dict[str, Any]) -> dict[str, Any]:
    """A notebook (nbformat's, or as JSON has it) whose metadata names Python and no machine's own:
    JupyterLab notes its kernel's name and exact version whenever it opens one."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    own = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {**notebook, "metadata": {**notebook["metadata"], **own}}


def notebook_text(notebook: dict[str, Any]) -> str:
    """The text of a notebook's file as git has it, and as JupyterLab writes it."""
    import nbformat  # late: it takes seconds

    return f"{nbformat.writes(nbformat.from_dict(in_form(notebook)))}\n"


def append_line(path: Path, row: dict) -> None:
    """Append one JSON row and flush it, so that a killed run keeps every finished row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as f:
        f.write(json.dumps(row) + "\n")


def read_lines(path: Path, repair: bool = False) -> list[dict]:
    """Rows of a JSONL file ([] when there is none), without a half-written last line.

    ``repair`` cuts that line, which a kill leaves, off the file. Only the process that appends to
    it may ask for that:
    to a reader beside it, a line that is being written looks the same.
    """
    if not path.is_file():
        return []
    rows, whole = [], 0
    data = path.read_bytes()
    for line in data.splitlines(keepends=True):
        try:
            if not line.endswith(b"\n"):
                raise ValueError
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            if whole + len(line) < len(data):
                raise SageError(
                    f"{path.parent.name}/{path.name}: line {len(rows) + 1} is not valid JSON; "
                    "delete that line, or the file, and run with --resume"
                ) from None
            if repair:
                os.truncate(path, whole)
            break
        whole += len(line)
    return rows


def rewrite_lines(path: Path, rows: Iterable[dict]) -> None:
    """Replace a JSONL file at once."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


@contextlib.contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[bool]:
    """Hold the lock that the file ``path`` stands for: True, or False where another process does.

    With ``wait`` until that one lets go. The kernel frees the lock when its holder ends, killed or
    not, and no process that the holder started keeps it. On a network's file system, too, as far
    as that knows record locks (``lockf``). A process must not ask for a lock that it holds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = True
        except (BlockingIOError, PermissionError):
            mine = False
        except OSError as error:
            raise SageError(
                f"{path.name} cannot be locked ({error.strerror}): set SAGE_BUILD to a folder on a "
                "disk that knows locks"
            ) from error
        yield mine


def is_locked(path: Path) -> bool:
    """Whether another process holds a lock of :func:`locked`."""
    if not path.is_file():
        return False
    with locked(path) as mine:
        return not mine


def require_space(folder: Path, gigabytes: float, what: str) -> None:
    """SageError when the disk below ``folder`` has less than ``gigabytes`` free: before the work,
    not at its end."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free / 1e9
    if free < gigabytes:
        raise SageError(
            f"{what} needs about {gigabytes:.1f} GB of disk and {free:.1f} GB are free: "
            "free some space, or set SAGE_BUILD to a folder on a larger disk and run with --resume"
        )
