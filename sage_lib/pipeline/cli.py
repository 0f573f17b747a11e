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
import sys

import sage_lib
from sage_lib.errors import SageError
from sage_lib.files import disk_errors
from sage_lib.pipeline import bench, compare, draw, grid, outputs, publish, reproduce, site, stages


def main(argv: list[str] | None = None) -> None:
    """Read a command line (``sys.argv`` without one) and do what it says.

    Bad input ends with one sentence and exit status 1, a misspelt command with argparse's own 2.
    """
    parser = argparse.ArgumentParser(
        prog="sage-companion",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {sage_lib.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    reproducing = commands.add_parser("reproduce", help="run the notebooks in order, headless")
    reproduce.add_arguments(reproducing)
    reproducing.set_defaults(do=reproduce.do)
    staging = commands.add_parser("stage", help="do one stage of a profile")
    stages.add_arguments(staging)
    staging.set_defaults(do=stages.do)
    gridding = commands.add_parser("grid", help="do all runs of a grid")
    grid.add_arguments(gridding)
    gridding.set_defaults(do=grid.do)
    dry = commands.add_parser("dry-run", help="print what a profile would do")
    stages.add_profile(dry)
    dry.set_defaults(do=reproduce.dry_run)
    benching = commands.add_parser("bench", help="measure a benchmark again")
    bench.add_arguments(benching)
    benching.set_defaults(do=bench.do)
    drawing = commands.add_parser("figures", help="draw all published figures and tables again")
    drawing.set_defaults(do=draw.do)
    storing = commands.add_parser("notebooks", help="execute the notebooks and store their outputs")
    outputs.add_arguments(storing)
    storing.set_defaults(do=outputs.do)
    building = commands.add_parser("site", help="build the site, without a network")
    building.set_defaults(do=site.do)
    comparing = commands.add_parser("compare", help="own results beside the published ones")
    stages.add_profile(comparing)
    comparing.set_defaults(do=compare.do)
    publishing = commands.add_parser("publish", help="put own results among the published ones")
    publish.add_arguments(publishing)
    publishing.set_defaults(do=publish.do)
    options = parser.parse_args(argv)
    try:
        with disk_errors():
            options.do(options)
    except SageError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: what was made is kept; the same command with --resume goes on")


if __name__ == "__main__":
    main()
