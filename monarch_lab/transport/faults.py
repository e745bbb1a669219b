"""Faults on purpose, at named points: how a mesh behaves when messages are lost, late, doubled, or a process dies.

One switch, MONARCH_LAB_FAULTS, read by config.py and "" by default: then no point exists and nothing is asked on the
way of a message. Rules are parted by blanks:

    POINT:ACTION[=SECONDS][@PROBABILITY][#TIMES]      seed=NUMBER

    MONARCH_LAB_FAULTS="hub.send:drop@0.1 dialer.receive:delay=0.5@0.05 agent.fork:crash#1 seed=7"

Without a probability always, without a number of times for ever, without a seed 0: the same faults at each run, as far
as the messages are the same. Pure, but for ``crash``.
"""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from monarch_lab.errors import UsageValueError

T = TypeVar("T")


class Action(Enum):
    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    REORDER = "reorder"  # the next one goes first
    TRUNCATE = "truncate"
    CRASH = "crash"  # SIGKILL of this process


_ON_MESSAGES = frozenset(Action)
# What can be done where. Each point is a line of code that asks for it by this name.
POINTS: dict[str, frozenset[Action]] = {
    "hub.send": _ON_MESSAGES,
    "hub.receive": _ON_MESSAGES,
    "dialer.send": _ON_MESSAGES,
    "dialer.receive": _ON_MESSAGES,
    "agent.fork": frozenset({Action.CRASH, Action.DROP}),  # drop: the process is not started, and told so
}
_RULE = re.compile(r"([a-z.]+):([a-z]+)(?:=([0-9.]+))?(?:@([0-9.]+))?(?:#([0-9]+))?")
_LATE_S = 0.1


@dataclass(frozen=True, slots=True)
class Rule:
    point: str
    action: Action
    seconds: float = _LATE_S
    probability: float = 1.0
    times: int | None = None


def parse_faults(text: str) -> tuple[list[Rule], int]:
    """The rules and the seed. UsageValueError with what is wrong."""
    rules, seed = [], 0
    for word in text.split():
        if word.startswith("seed=") and word[5:].isdecimal():
            seed = int(word[5:])
            continue
        rules.append(_parse_rule(word))
    return rules, seed


def _parse_rule(word: str) -> Rule:
    found = _RULE.fullmatch(word)
    if found is None:
        raise UsageValueError(
            f"MONARCH_LAB_FAULTS: {word!r} is no rule: write POINT:ACTION[=SECONDS][@PROBABILITY][#TIMES] "
            "or seed=NUMBER"
        )
    point, name, seconds, probability, times = found.groups()
    if point not in POINTS:
        raise UsageValueError(f"MONARCH_LAB_FAULTS: {point!r} is no point: there are {', '.join(POINTS)}")
    known = sorted(action.value for action in POINTS[point])
    if name not in known:
        raise UsageValueError(f"MONARCH_LAB_FAULTS: {name!r} cannot be done at {point}: there are {', '.join(known)}")
    if seconds is not None and name != Action.DELAY.value:
        raise UsageValueError(f"MONARCH_LAB_FAULTS: {word!r}: only a delay has seconds")
    try:
        chance = 1.0 if probability is None else float(probability)
        late = _LATE_S if seconds is None else float(seconds)
    except ValueError:
        raise UsageValueError(f"MONARCH_LAB_FAULTS: {word!r} has a number that is none") from None
    if not 0 <= chance <= 1:
        raise UsageValueError(f"MONARCH_LAB_FAULTS: {word!r}: a probability is between 0 and 1")
    return Rule(point, Action(name), late, chance, None if times is None else int(times))


class Faults:
    def __init__(self, text: str = "") -> None:
        self._rules, self._seed = parse_faults(text)

    def at(self, point: str, truncate: Callable[[T], T] = lambda message: message) -> Point[T] | None:
        """None where no rule is for this point: then there is nothing to ask. ``truncate`` cuts a message short."""
        assert point in POINTS
        rules = [rule for rule in self._rules if rule.point == point]
        # By name, and not by hash(), which differs from process to process.
        return Point(rules, random.Random(f"{self._seed} {point}"), truncate) if rules else None


NO_FAULTS = Faults()


class Point(Generic[T]):
    """What happens to the messages that pass here, in turn."""

    def __init__(self, rules: Sequence[Rule], rng: random.Random, truncate: Callable[[T], T]) -> None:
        self._rules = rules
        self._left = [rule.times for rule in rules]
        self._rng = rng
        self._truncate = truncate
        self._late: list[tuple[float, T]] = []  # and when each goes on
        self._held: list[T] = []  # until another has passed

    def strike(self) -> Rule | None:
        """The rule that applies now, if one does. For points without messages. A crash does not return."""
        for at, rule in enumerate(self._rules):
            left = self._left[at]
            if left == 0 or self._rng.random() >= rule.probability:
                continue
            self._left[at] = None if left is None else left - 1
            if rule.action is Action.CRASH:
                os.kill(os.getpid(), signal.SIGKILL)
            return rule
        return None

    def pass_on(self, message: T, now: float) -> list[T]:
        """What goes on now in its place; what is late comes with ``due``."""
        held, self._held = self._held, []
        rule = self.strike()
        match rule.action if rule is not None else None:
            case Action.DROP:
                return held
            case Action.DELAY:
                assert rule is not None
                self._late.append((now + rule.seconds, message))
                return held
            case Action.DUPLICATE:
                return [message, message, *held]
            case Action.REORDER:
                self._held = [message]
                return held
            case Action.TRUNCATE:
                return [self._truncate(message), *held]
        return [message, *held]

    def due(self, now: float) -> list[T]:
        """What was delayed until now."""
        found = [message for at, message in self._late if at <= now]
        self._late = [(at, message) for at, message in self._late if at > now]
        return found

    def next_due(self) -> float:
        return min((at for at, _ in self._late), default=float("inf"))
