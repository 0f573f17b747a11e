"""The commands of the SAGE companion.

sage-companion reproduce --profile smoke    all runs and every notebook, from nothing
sage-companion stage rl --profile laptop    one stage; what is finished is kept
sage-companion grid study --dry-run         all runs of a larger study; resumable
sage-companion dry-run --profile paper      settings, data, plan, memory; trains nothing
sage-companion figures                      draw all published figures and tables again
sage-companion notebooks --check            do the notebooks still say what is stored in them?
sage-companion compare --profile smoke      own results beside the published ones
sage-companion publish --profile smoke      put own results in the place of the published ones
sage-companion guide-gain --profile smoke   what would a guide do to the optimum of a base?
sage-companion pass-at-k FILE FILE          curves of samples in files, and their difference
"""

import argparse
import importlib
import os
import sys

import sage_lib
from sage_lib.errors import SageError
from sage_lib.files import disk_errors

COMMANDS = (
    *("reproduce", "stage", "grid", "dry-run", "figures", "notebooks", "compare", "publish"),
    *("guide-gain", "pass-at-k"),
)
#: Commands whose module has another name. Each module has ``add_arguments`` and ``run_COMMAND``.
MODULES = {"stage": "stages", "dry-run": "plan", "notebooks": "outputs"}


def main(argv: list[str] | None = None) -> None:
    """Read a command line (by default ``sys.argv``) and do what it says.

    Bad input ends with one sentence and exit status 1, a misspelt command with argparse's own 2.
    """
    words = sys.argv[1:] if argv is None else argv
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("sage-companion", description=__doc__, formatter_class=form)
    parser.add_argument("--version", action="version", version=f"%(prog)s {sage_lib.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in COMMANDS:
        command = commands.add_parser(name)
        if name in words[:1]:  # the others are not imported: some take seconds
            module = MODULES.get(name, name.replace("-", "_"))
            imported = importlib.import_module(f"sage_lib.pipeline.{module}")
            command.description = imported.__doc__
            imported.add_arguments(command)
            command.set_defaults(function=getattr(imported, f"run_{name.replace('-', '_')}"))
    options = parser.parse_args(words)
    try:
        with disk_errors():
            options.function(options)
        sys.stdout.flush()
    except SageError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # as in `sage-companion grid study --dry-run | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        option = " with --resume" if hasattr(options, "resume") else ""
        sys.exit(f"interrupted: what was made is kept; the same command{option} goes on")


if __name__ == "__main__":
    main()
