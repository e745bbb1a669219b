"""``monarch-lab SUBCOMMAND`` and ``python -m monarch_lab``.

Exit status: 0 done, 1 it could not be done, 2 what was asked for makes no sense, 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from monarch_lab import __version__
from monarch_lab.arguments import HELP, suggestion
from monarch_lab.cli.commands import COMMANDS, PROG
from monarch_lab.errors import MeshError, UsageError, UsageValueError


def main(words: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if words is None else words)
    try:
        status = _run(words)
        sys.stdout.flush()
        return status
    except UsageError as error:
        return _complain(str(error), 2)
    except MeshError as error:
        return _complain(f"{PROG}: {error}", 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read has enough (`| head`); the interpreter would complain about it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: list[str]) -> int:
    if not words or words[0] in HELP:
        print(_overview())
        return 0 if words else 2
    if words[0] == "--version":
        print(__version__)
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        raise UsageValueError(f"{PROG}: unknown sub-command {words[0]!r}{suggestion(words[0], COMMANDS)}")
    parser = command.parser()
    arguments = parser.read(words[1:])
    if arguments.help:
        print(parser.format_help().rstrip())
        return 0
    return command.run(arguments)


def _overview() -> str:
    lines = [f"usage: {PROG} SUBCOMMAND [options]", ""]
    lines += [f"  {command.name:<8} {command.does}" for command in COMMANDS.values()]
    return "\n".join([*lines, "", f"{PROG} SUBCOMMAND --help lists the options; {PROG} --version."])


def _complain(text: str, status: int) -> int:
    print(text if text.startswith(PROG) else f"{PROG}: {text}", file=sys.stderr)
    return status
