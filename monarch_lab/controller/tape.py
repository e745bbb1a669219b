"""Numbers of a recording that are computed here at each replay: what optimizers make of their step counters and rates.

While a function is recorded, a number that was read from a 0-dim constant or an optimizer's group is a Traced: a
stand-in that notes the arithmetic done with it. The notes become one Python function, run before each replay; it
gives the ops' numbers, or None where the user's code would have gone another way (a comparison that came out
otherwise, a value that was turned into a plain number and has changed).
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch

_SIMPLE = (int, float)


class Traced(float):
    """A float with a past. Whatever it cannot follow makes its value part of what the recording is for.

    C code reads a float's value without asking; the functions of ``math`` are hooked for that (MathHook).
    """

    __slots__ = ("tape", "name")
    tape: Tape
    name: str

    @staticmethod
    def __new__(cls: type[Traced], tape: Tape, name: str, value: float) -> Traced:
        made = float.__new__(cls, value)
        made.tape, made.name = tape, name
        return made

    def __init__(self, *args: Any) -> None:
        pass

    @property
    def value(self) -> float:
        return float.__pos__(self)

    def plain(self) -> float:
        """The value as a number that does not change: the recording holds for this one alone."""
        self.tape.guard(f"same({self.name}, {self.tape.constant(self.value)})")
        return self.value

    def __float__(self) -> float:
        return float(self.plain())

    def __int__(self) -> int:
        return int(self.plain())

    def __bool__(self) -> bool:
        return self.tape.decide(f"bool({self.name})", bool(self.value))

    def __round__(self, digits: Any = None) -> Any:
        return round(self.plain(), digits)

    def __hash__(self) -> int:
        return hash(self.plain())

    def __repr__(self) -> str:
        return repr(self.plain())

    def __format__(self, spec: str) -> str:
        return format(self.plain(), spec)

    def __reduce__(self) -> Any:
        return float, (self.plain(),)


def _binary(sign: str, compute: Callable[[Any, Any], Any], *, swapped: bool) -> Callable[[Traced, Any], Any]:
    def method(self: Traced, other: Any) -> Any:
        if type(other) not in (Traced, *_SIMPLE):
            return NotImplemented
        left, right = (other, self) if swapped else (self, other)
        value = compute(value_of(left), value_of(right))
        if self.tape.is_closed:
            return value
        return self.tape.emit(f"{self.tape.name(left)} {sign} {self.tape.name(right)}", value)

    return method


def _comparison(sign: str, compute: Callable[[Any, Any], bool]) -> Callable[[Traced, Any], Any]:
    def method(self: Traced, other: Any) -> Any:
        if type(other) not in (Traced, *_SIMPLE):
            return NotImplemented
        found = compute(self.value, value_of(other))
        return self.tape.decide(f"{self.tape.name(self)} {sign} {self.tape.name(other)}", found)

    return method


def _unary(text: str, compute: Callable[[Any], Any]) -> Callable[[Traced], Any]:
    def method(self: Traced) -> Any:
        value = compute(self.value)
        return value if self.tape.is_closed else self.tape.emit(text.format(self.name), value)

    return method


_ARITHMETIC: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "add": ("+", lambda a, b: a + b),
    "sub": ("-", lambda a, b: a - b),
    "mul": ("*", lambda a, b: a * b),
    "truediv": ("/", lambda a, b: a / b),
    "floordiv": ("//", lambda a, b: a // b),
    "mod": ("%", lambda a, b: a % b),
    "pow": ("**", lambda a, b: a**b),
}
_COMPARISONS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "lt": ("<", lambda a, b: a < b),
    "le": ("<=", lambda a, b: a <= b),
    "gt": (">", lambda a, b: a > b),
    "ge": (">=", lambda a, b: a >= b),
    "eq": ("==", lambda a, b: a == b),
    "ne": ("!=", lambda a, b: a != b),
}
for _name, (_sign, _compute) in _ARITHMETIC.items():
    setattr(Traced, f"__{_name}__", _binary(_sign, _compute, swapped=False))
    setattr(Traced, f"__r{_name}__", _binary(_sign, _compute, swapped=True))
for _name, (_sign, _compare) in _COMPARISONS.items():
    setattr(Traced, f"__{_name}__", _comparison(_sign, _compare))
setattr(Traced, "__neg__", _unary("-{}", lambda a: -a))  # noqa: B010  as the others
setattr(Traced, "__abs__", _unary("abs({})", abs))  # noqa: B010


def value_of(number: Any) -> Any:
    return number.value if type(number) is Traced else number


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (a != a and b != b))


class MathHook:
    """While a function is recorded, the functions of ``math`` note what they are given."""

    def __init__(self) -> None:
        self._before = {n: f for n, f in vars(math).items() if isinstance(f, types.BuiltinFunctionType)}

    def __enter__(self) -> None:
        for name, function in self._before.items():
            setattr(math, name, _noting(function))

    def __exit__(self, *exc: Any) -> None:
        for name, function in self._before.items():
            setattr(math, name, function)


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tape = next((a.tape for a in args if type(a) is Traced), None)
        if tape is None or tape.is_closed or kwargs or any(type(a) not in (Traced, *_SIMPLE) for a in args):
            return function(*[plain_within(a) for a in args], **kwargs)
        return tape.call(function, args, function(*map(value_of, args)))

    return call


def plain_within(value: Any) -> Any:
    """``value`` with each Traced in it made a number that does not change."""
    if type(value) is Traced:
        return value.plain()
    if type(value) in (list, tuple) and any(type(v) in (Traced, list, tuple) for v in value):
        return type(value)([plain_within(v) for v in value])
    return value


class Tape:
    """What is computed before a replay. The function made of it takes nothing and gives a list of the numbers that
    were asked for with ``operand``, or None; ``commit`` then stores the constants that it wrote."""

    def __init__(self) -> None:
        self.is_closed = False
        self._lines: list[str] = []
        self._names: dict[str, Any] = {"same": _same, "nan": math.nan, "inf": math.inf}
        self._count = 0
        self._shadows: dict[int, str] = {}  # id of a constant -> its variable
        self._owned: set[int] = set()  # the variable is the tape's own copy
        self._written: dict[int, Callable[[], Any]] = {}  # captured constants that are written
        self._kept: list[Any] = []  # so that an id stays what it is
        self._operands: dict[str, int] = {}

    # --- notes

    def constant(self, value: Any) -> str:
        if type(value) in _SIMPLE:
            return f"({value!r})"
        name = f"k{len(self._names)}"
        self._names[name] = value
        return name

    def name(self, number: Any) -> str:
        if type(number) is not Traced:
            return self.constant(number)
        return number.name if number.tape is self else self.constant(number.value)

    def _assign(self, expression: str) -> str:
        self._count += 1
        self._lines.append(f"v{self._count} = {expression}")
        return f"v{self._count}"

    def emit(self, expression: str, value: Any) -> Any:
        name = self._assign(expression)
        if type(value) is float:
            return Traced(self, name, value)
        self.guard(f"same({name}, {self.constant(value)})")
        return value

    def guard(self, condition: str) -> None:
        if not self.is_closed:
            self._lines.append(f"if not ({condition}): return None")

    def decide(self, condition: str, found: bool) -> bool:
        self.guard(f"({condition}) is {found}")
        return found

    def read(self, holder: Any, key: Any, value: float) -> Traced:
        """``holder[key]`` holds ``value`` now: read again at each replay."""
        return Traced(self, self._assign(f"{self.constant(holder)}[{self.constant(key)}]"), value)

    def read_part(self, whole: Any, index: int, value: Any) -> Any:
        return self.emit(f"{whole}[{index}]", value)

    def hold(self, holder: Any, key: Any) -> str:
        return self._assign(f"{self.constant(holder)}[{self.constant(key)}]")

    def expect(self, holder: Any, key: Any, value: Any) -> None:
        self.guard(f"same({self.constant(holder)}[{self.constant(key)}], {self.constant(value)})")

    def call(self, function: Any, args: tuple[Any, ...], value: Any) -> Any:
        """Note a call among numbers."""
        return self.emit(f"{self.constant(function)}({', '.join(map(self.name, args))})", value)

    def operand(self, number: Traced) -> int:
        """Its position among the numbers that the function gives."""
        return self._operands.setdefault(number.name, len(self._operands))

    # --- 0-dim constants, whose values are local tensors

    def knows(self, constant: Any) -> bool:
        return id(constant) in self._shadows

    def capture(self, constant: Any, find: Callable[[], Any]) -> None:
        """A constant made before the recorded function ran; ``find`` gives it, or None."""
        self._kept.append(constant._value)
        holder = self._assign(f"{self.constant(find)}()")
        self.guard(f"{holder} is not None and hasattr({holder}, '_value')")
        self._shadows[id(constant)] = self._assign(f"{holder}._value")
        self._written[id(constant)] = find

    def item(self, constant: Any) -> Any:
        value = constant._value.item()
        return self.emit(f"{self._shadows[id(constant)]}.item()", value)

    def compute(self, function: Any, args: Any, kwargs: Any, target: Any) -> str:
        """Note a call among constants; ``target``: the one that it writes, or None. The variable of its result."""

        def text(value: Any) -> str:
            if id(value) in self._shadows:
                return self._shadows[id(value)]
            if hasattr(value, "_value"):
                return f"{self.constant(value._value.clone())}.clone()"
            return self.name(value)

        if target is not None and id(target) not in self._owned:
            self._owned.add(id(target))
            self._shadows[id(target)] = self._assign(f"{text(target)}.clone()")
        words = [text(a) for a in args] + [f"{k}={text(v)}" for k, v in kwargs.items()]
        return self._assign(f"{self.constant(function)}({', '.join(words)})")

    def own(self, constant: Any, variable: str) -> None:
        """A constant made inside has the value of a variable."""
        self._kept.append(constant._value)
        self._shadows[id(constant)] = variable
        self._owned.add(id(constant))

    def result(self, constant: Any) -> int | None:
        """For a constant that the function returns: the position of its value; None where it is always the same."""
        name = self._shadows.get(id(constant))
        return None if name is None else self._operands.setdefault(f"{name}.clone()", len(self._operands))

    # --- the function

    def close(self) -> Callable[[], tuple[list[Any], list[tuple[Any, Any]]] | None]:
        """() -> (numbers, constants with their new values), or None."""
        self.is_closed = True
        written = [
            f"({self.constant(find)}(), {self._shadows[key]})"
            for key, find in self._written.items()
            if key in self._owned
        ]
        body = [*self._lines, f"return [{', '.join(self._operands)}], [{', '.join(written)}]"]
        text = "\n    ".join(["def numbers():", *body])
        exec(compile(text, "<monarch_lab numbers>", "exec"), self._names)
        function = self._names["numbers"]

        def run() -> Any:
            with torch._C.DisableTorchFunction():
                return function()

        return run
