"""The diagrams of docs/lifecycle.md, drawn from the tables. ``python -m tests.architecture.diagrams`` redraws them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monarch_lab.agent.host_core import MOVES, AgentState
from monarch_lab.supervisor.host_states import HOST_MOVES, PROCESS_MOVES, HostState
from monarch_lab.supervisor.host_states import ProcessState as HostProcessState
from monarch_lab.supervisor.lifecycle import TRANSITIONS, ProcessState

PAGE = Path(__file__).parents[2] / "docs" / "lifecycle.md"
# Name in the page -> (moves, the state in which life begins).
TABLES: dict[str, tuple[Mapping[tuple[Any, Any], Any], Any]] = {
    "process of a mesh": (TRANSITIONS, ProcessState.LAUNCHING),
    "host": (HOST_MOVES, HostState.UNATTACHED),
    "process of a host": (PROCESS_MOVES, HostProcessState.LAUNCHING),
    "agent of a host": (MOVES, AgentState.SERVING),
}


def draw(name: str) -> str:
    """As the page has it, markers and all; moves that change nothing are left out."""
    moves, first = TABLES[name]
    lines = [f"<!-- drawn from the table: {name} -->", "```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}"]
    events: dict[tuple[str, str], list[str]] = {}
    for (state, event), after in moves.items():
        if after is not state:
            events.setdefault((state.name, after.name), []).append(_name(event))
    lines += [f"    {state} --> {after}: {', '.join(names)}" for (state, after), names in events.items()]
    left = {state.name for (state, _), after in moves.items() if after is not state}
    lines += [f"    {state.name} --> [*]" for state in type(first) if state.name not in left]
    return "\n".join([*lines, "```"])


def _name(event: Any) -> str:
    return str(event.__name__) if isinstance(event, type) else str(event.name.lower().replace("_", " "))


def pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"<!-- drawn from the table: {re.escape(name)} -->\n```mermaid\n.*?\n```", re.DOTALL)


def main() -> None:
    page = PAGE.read_text()
    for name in TABLES:
        page = pattern(name).sub(lambda _, name=name: draw(name), page)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
