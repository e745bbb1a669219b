"""Reading what users type after a magic or in a shell: argparse, with every fault one sentence, and did-you-mean."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Iterable
from typing import NoReturn

from monarch_lab.errors import UsageValueError

HELP = ("-h", "--help")


class Parser(argparse.ArgumentParser):
    """``prog`` is the command as typed. Never prints and never exits: a fault is a UsageValueError."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
        )
        self.add_argument(*HELP, action="store_true", help="show this text")

    def error(self, message: str) -> NoReturn:
        raise UsageValueError(f"{self.prog}: {message}")

    def read(self, words: list[str]) -> argparse.Namespace:
        if set(words) & set(HELP):
            return argparse.Namespace(help=True)
        try:
            arguments, unknown = self.parse_known_args(words)
        except argparse.ArgumentError as error:
            self.error(f"{error.argument_name}: {error.message}" if error.argument_name else error.message)
        except UsageValueError as error:
            raise error.with_traceback(None) from None  # argparse's own frames are no line of the user's
        if unknown:
            word = unknown[0].partition("=")[0]
            kind = "option" if word.startswith("-") else "argument"
            self.error(f"unknown {kind} {word!r}{suggestion(word, self.options())}")
        return arguments

    def options(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings if option.startswith("--")]


def split(line: str, magic: str) -> list[str]:
    """The words of a magic's line, quoted as in a shell."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageValueError(f"{magic}: {str(error).lower()} in {line!r}") from None


def suggestion(word: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """``; did you mean X?``, or what there is."""
    known = list(known)
    near = difflib.get_close_matches(word, known, 1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there is {otherwise or ', '.join(known)}" if known else ""


def count(text: str, at_least: int = 1) -> int:
    """For ``type=``: a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < at_least:
        raise argparse.ArgumentTypeError(f"must be at least {at_least}, not {number}")
    return number


def lines_number(text: str) -> int:
    """For ``type=``: a whole number of at least 0."""
    return count(text, 0)


def assignment(text: str) -> tuple[str, str]:
    """For ``type=``: ``KEY=VALUE``."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return name, value
