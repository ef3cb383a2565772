"""The command line: ``oocdl`` and a command for each verb, which are imported when one is called.

Every error is one line on stderr; the exit code is the error's own, or 130, 143, 129 after a signal.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from oocdl.cli.say import INTERRUPTED_EXIT_CODE, Ended, say
from oocdl.errors import InputError, OocdlError
from oocdl.host.limits import installed_version
from oocdl.storage.files import io_error


@cache
def descriptions() -> Mapping[str, str]:
    """Return command -> its description, read in the sources of the commands: none is imported."""
    folder = Path(__file__).parent
    trees = {name: ast.parse((folder / f"{name}.py").read_bytes()) for name in ("verbs", "look", "cluster")}
    found = {
        node.name: ast.get_docstring(node) or ""
        for node in (*trees["verbs"].body, *trees["look"].body)
        if isinstance(node, ast.FunctionDef) and "app.command()" in map(ast.unparse, node.decorator_list)
    }
    return found | {"cluster": ast.get_docstring(trees["cluster"]) or ""}


class Commands(TyperGroup):
    """The commands: they are imported when one is called, and listed before."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*descriptions()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        told = descriptions().get(cmd_name)
        return self.commands.get(cmd_name, None if told is None else TyperCommand(cmd_name, help=told))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        from oocdl.cli import verbs

        self.commands = get_group(verbs.app).commands
        return super().resolve_command(ctx, args)


EPILOG = "--debug, anywhere, shows the traceback of an error."
app = typer.Typer(cls=Commands, epilog=EPILOG, pretty_exceptions_enable=False, rich_markup_mode=None)


def _say_version(asked: bool) -> None:
    if asked:
        say(f"oocdl {installed_version('oocdl')}")
        raise typer.Exit


@app.callback()
def shared(
    register: Annotated[
        list[Path] | None,
        typer.Option(help="Python file to run first, to register your own parts; may be repeated."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Print the version.")
    ] = False,
) -> None:
    """Trains an ONNX model on a Zarr or HDF5 dataset within a memory budget, exactly."""
    run_files(register or ())


def run_files(paths: Sequence[Path]) -> None:
    """Run files of Python, which register a user's own parts. Raises InputError if one fails."""
    for path in paths:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise InputError(f"--register takes a file of Python, and '{path}' is none")
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise InputError(f"--register {path}: {type(error).__name__}: {error}") from error


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    _open_streams()
    warnings.formatwarning = lambda message, *_, **__: f"oocdl: {_as_typed(str(message))}\n"
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = [argument for argument in given if argument != "--debug"] or ["--help"]
    code = run_command(arguments, debug="--debug" in given)
    try:
        sys.stdout.flush()
    except OSError:  # it was said; Python would say it once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _open_streams() -> None:
    """Give a stream that is closed a place to write to, and stdout a sign for what its encoding lacks."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", errors="replace"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def run_command(arguments: Sequence[str], debug: bool) -> int:
    """Run one command; returns its exit code. Errors become one line."""
    try:
        code = app(list(arguments), prog_name="oocdl", standalone_mode=False)
        sys.stdout.flush()  # what cannot be written is an error of this command
    except typer.TyperException as error:
        return complain(error, error.format_message(), InputError.exit_code, debug)
    except (OocdlError, Ended) as error:
        return complain(error, str(error), error.exit_code, debug)
    except KeyboardInterrupt:
        code = INTERRUPTED_EXIT_CODE
    except OSError as error:
        found = io_error(error, Path("the output or a file"), 0, "read or write")
        return complain(error, str(found), found.exit_code, debug)
    except Exception as error:
        text = f"internal error: {type(error).__name__}: {error}; --debug shows where"
        return complain(error, text, 1, debug)
    if code == INTERRUPTED_EXIT_CODE:
        print("oocdl: interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def complain(error: Exception, text: str, code: int, debug: bool) -> int:
    """Print an error as one line on stderr, after the traceback with ``debug``; returns ``code``."""
    if debug:
        traceback.print_exception(error)
    print(f"oocdl: {' '.join(_as_typed(text).split())}", file=sys.stderr)
    return code


def _as_typed(text: str) -> str:
    """Name options as they are typed, once a command has loaded them."""
    return str(getattr(sys.modules.get("oocdl.cli.verb_options"), "in_flags", str)(text))
