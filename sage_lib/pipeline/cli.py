"""sage-companion: the pipeline's commands under one name.

sage-companion reproduce --profile smoke    every notebook, headless, from nothing
sage-companion stage rl --profile laptop    one stage; what is finished is kept
sage-companion grid countdown --dry-run     all runs of a grid, some at a time; resumable
sage-companion dry-run --profile paper      settings, data, plan, memory; trains nothing
sage-companion bench verifier               measure a benchmark again
sage-companion figures                      draw all published figures and tables again
sage-companion notebooks --check            do the notebooks still say what is stored in them?
sage-companion site                         build the site from notebooks, figures, docstrings
sage-companion compare --profile smoke      own results beside the published ones
sage-companion publish --profile smoke      put own results in the place of the published ones
"""

import argparse
import importlib
import os
import sys

import sage_lib
from sage_lib.errors import SageError
from sage_lib.files import disk_errors

#: Command -> its module in this room, and its help. A module has ``do``, and ``add_arguments``
#: where there is something to choose; only that of the given command is imported, since some take
#: seconds.
COMMANDS = {
    "reproduce": ("reproduce", "run the notebooks in order, headless"),
    "stage": ("stages", "do one stage of a profile"),
    "grid": ("grid", "do all runs of a grid"),
    "dry-run": ("plan", "print what a profile would do"),
    "bench": ("bench", "measure a benchmark again"),
    "figures": ("draw", "draw all published figures and tables again"),
    "notebooks": ("outputs", "execute the notebooks and store their outputs"),
    "site": ("site", "build the site, without a network"),
    "compare": ("compare", "own results beside the published ones"),
    "publish": ("publish", "put own results among the published ones"),
}


def main(argv: list[str] | None = None) -> None:
    """Read a command line (``sys.argv`` without one) and do what it says.

    Bad input ends with one sentence and exit status 1, a misspelt command with argparse's own 2.
    """
    words = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="sage-companion",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {sage_lib.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, about) in COMMANDS.items():
        command = commands.add_parser(name, help=about)
        if name in words[:1]:
            chosen = importlib.import_module(f"sage_lib.pipeline.{module}")
            getattr(chosen, "add_arguments", lambda parser: None)(command)
            command.set_defaults(do=chosen.do)
    options = parser.parse_args(words)
    try:
        with disk_errors():
            options.do(options)
        sys.stdout.flush()
    except SageError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # the reader of a list, as `head`, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit("interrupted: what was made is kept; the same command with --resume goes on")


if __name__ == "__main__":
    main()
