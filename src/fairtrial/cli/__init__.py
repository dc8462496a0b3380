"""The command line: ``fairtrial list | show | run | compare | apply | report | samples | doctor``.

Exit codes: 0 done; 2 the input cannot be used (one line says what to do); 3 done, but cells were lost; 130 stopped by
Ctrl-C, resumable. ``--debug`` shows tracebacks.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
import warnings

DONE, BAD_INPUT, CELLS_LOST, INTERRUPTED, PIPE_CLOSED = 0, 2, 3, 130, 141


def main() -> None:
    """Run the command line and exit; warnings are lines for its user, not places in the code."""
    if "--debug" not in sys.argv:
        warnings.showwarning = _show_warning  # type: ignore[assignment]
    sys.exit(run_app(sys.argv[1:]))


def run_app(arguments: list[str]) -> int:
    """Run the command line on ``arguments`` and return the exit code."""
    from fairtrial.errors import FairtrialError

    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if debug:
        os.environ["FAIRTRIAL_DEBUG"] = "1"  # workers show their tracebacks too
    try:
        import click

        from fairtrial.cli.app import app

        try:
            code = app(args=arguments, prog_name="fairtrial", standalone_mode=False)
            sys.stdout.flush()
            return code if isinstance(code, int) else DONE
        except click.ClickException as error:
            error.show()
            return error.exit_code
        except click.exceptions.Exit as done:
            return done.exit_code
        except (click.Abort, KeyboardInterrupt):
            return INTERRUPTED
        except SystemExit as ended:
            if isinstance(ended.__context__, BrokenPipeError):  # for which click exits with 1
                return PIPE_CLOSED
            raise
    except FairtrialError as error:
        if debug:
            raise
        print(f"fairtrial: {error}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        _say_no_more()
        return PIPE_CLOSED
    except OSError as error:
        if debug or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EBADF):
            raise
        _say_no_more()
        print(f"fairtrial: cannot write the output: {error.strerror}", file=sys.stderr)
        return BAD_INPUT


def _show_warning(message: Warning | str, *_place: object) -> None:
    _tell(str(message))


@functools.cache  # once, however many steps of a command warn of it
def _tell(warning: str) -> None:
    print(f"fairtrial: {warning}", file=sys.stderr)


def _say_no_more() -> None:
    """Let nothing be left to flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
