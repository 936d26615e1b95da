"""The command line: parse, call, print. The commands are in `commands/`, one dataclass each."""

import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import tyro
from tyro.conf import subcommand

from layerwave.commands.bench import Bench
from layerwave.commands.calibrate import Calibrate, Merge
from layerwave.commands.distill import Distill
from layerwave.commands.evaluate import Evaluate
from layerwave.commands.export import Export
from layerwave.commands.quickstart import Quickstart
from layerwave.commands.select import Report, Select
from layerwave.commands.tools import Doctor, Ids
from layerwave.commands.train import Train
from layerwave.commands.validate import Validate
from layerwave.errors import LayerwaveError, one_line
from layerwave.interruption import ending_by_signals, received

Command = (
    Annotated[Quickstart, subcommand("quickstart")]
    | Annotated[Calibrate, subcommand("calibrate")]
    | Annotated[Merge, subcommand("merge")]
    | Annotated[Select, subcommand("select")]
    | Annotated[Report, subcommand("report")]
    | Annotated[Distill, subcommand("distill")]
    | Annotated[Train, subcommand("train")]
    | Annotated[Evaluate, subcommand("evaluate")]
    | Annotated[Validate, subcommand("validate")]
    | Annotated[Export, subcommand("export")]
    | Annotated[Ids, subcommand("ids")]
    | Annotated[Doctor, subcommand("doctor")]
    | Annotated[Bench, subcommand("bench")]
)


@contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """Warnings look like errors do, whether or not another library has given the root logger a look of its own."""
    logger, handler = logging.getLogger("layerwave"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("layerwave: warning: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(handler)


def main(args: list[str] | None = None) -> None:
    """Entry point of `layerwave`.

    Exit codes: 0; 2 for what the user can mend (one line on stderr; with `--debug`, wherever it stands, the traceback
    comes before it); 130 and 143 for SIGINT and SIGTERM (another line).
    """
    args = sys.argv[1:] if args is None else args
    debug, args = "--debug" in args, [arg for arg in args if arg != "--debug"]
    try:
        with ending_by_signals(), warnings_on_stderr():
            # Parsing builds the settings, which refuse values out of range.
            command = tyro.cli(
                Command,
                args=args,
                prog="layerwave",
                description="Measure which layers of a target a speculative-decoding draft should read. "
                "Every command takes --debug: print the traceback of an error.",
            )
            command.run()
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) or received():
            print("layerwave: interrupted; nothing half-written was left", file=sys.stderr, flush=True)
            # At once: what JAX and Orbax still do in their threads crashes while the libraries are taken down.
            os._exit(128 + (received() or signal.SIGINT))
        if not isinstance(error, LayerwaveError | OSError):  # OSError: a file that nobody expected to fail
            raise
        if debug:
            traceback.print_exc()
        print(f"layerwave: error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
