"""Messages that start, watch and end processes: kernel, agent, zygote, and a worker's first words.

Each peer proves itself first: AgentHello or WorkerHello to the kernel, Welcome back, all with the mesh's key.
Nothing else from a peer is read before that. The key travels in AgentSpec, ZygoteSpec's pair and WorkerSpec only.
"""

from __future__ import annotations

import msgspec

from monarch_lab.wire.keys import CurveKeys


class Message(msgspec.Struct, frozen=True, tag=True):
    pass


# --- kernel to any peer, after its hello


class Welcome(Message, frozen=True):
    """First message on each socket a peer reads: it comes from the kernel that made the mesh."""

    key: bytes


# --- kernel to agent


class MeshFacts(msgspec.Struct, frozen=True):
    """What every worker of a mesh is told. Travels with each order: the agent may be older than the mesh."""

    name: str
    world_size: int
    device: str  # "cpu" or "cuda"
    seed: int
    python_path: list[str]
    cwd: str
    gpus: int = 0  # how many the workers have between them, of device "cuda"


class LaunchWorker(Message, frozen=True):
    """Fork one worker from the zygote. Answered once, by ProcessStarted or ProcessNotStarted."""

    process: int  # the supervisor's number for it, never reused in a mesh
    rank: int
    local_rank: int
    env: dict[str, str]  # added to the zygote's environment
    stdout_path: str
    stderr_path: str
    mesh: MeshFacts
    without: list[str] = []  # variables taken out of the zygote's environment
    host: str = "0"
    local_world_size: int = 1
    curve: CurveKeys | None = None  # its own; where the sockets are TCP's, and this message travels encrypted


class SignalProcess(Message, frozen=True):
    """Send a signal to a process (its whole process group where ``group``). Unknown or ended: ignored."""

    process: int
    signal: int
    group: bool = False


class StopAgent(Message, frozen=True):
    """End every process (SIGTERM, then SIGKILL after ``grace_s``), remove the directory, exit.

    Answered by AgentStopped when none is left.
    """

    grace_s: float


# --- agent to kernel


class AgentHello(Message, frozen=True):
    """First message of an agent."""

    key: bytes
    host: str
    pid: int
    python: str
    version: str  # of monarch_lab


class ZygoteReady(Message, frozen=True):
    """torch is imported: forks are quick from now on."""

    pid: int
    torch: str
    seconds: float


class ZygoteFailed(Message, frozen=True):
    """The zygote ended, whenever it was; ``text`` is what it printed last. The next order to fork starts another."""

    text: str


class ProcessStarted(Message, frozen=True):
    process: int
    pid: int


class ProcessNotStarted(Message, frozen=True):
    process: int
    text: str


class ProcessExited(Message, frozen=True):
    """A process ended: ``code`` >= 0 is its exit code, < 0 the signal. ``last_lines`` are the end of its stderr."""

    process: int
    pid: int
    code: int
    out_of_memory: bool = False
    last_lines: str = ""


class ProcessUsage(msgspec.Struct, frozen=True):
    process: int
    rss_bytes: int
    cpu_s: float
    state: str  # the letter of /proc/PID/stat


class Beat(Message, frozen=True):
    """Once a second: the agent is alive, and what its processes use."""

    number: int
    usage: list[ProcessUsage]


class AgentEnding(Message, frozen=True):
    """Somebody other than the kernel ends the agent, and every process with it. AgentStopped follows."""

    note: str


class AgentStopped(Message, frozen=True):
    """Nothing is left below the agent, and it ends."""


ToAgent = Welcome | LaunchWorker | SignalProcess | StopAgent
FromAgent = (
    AgentHello
    | ZygoteReady
    | ZygoteFailed
    | ProcessStarted
    | ProcessNotStarted
    | ProcessExited
    | Beat
    | AgentEnding
    | AgentStopped
)


# --- worker to kernel


class WorkerHello(Message, frozen=True):
    """First message of a worker's report socket. Answered by a Welcome on each of its two subscriptions."""

    key: bytes
    process: int
    rank: int
    pid: int
    torch: str


# --- kernel to agent, once, over the agent's stdin


class AgentSpec(msgspec.Struct, frozen=True):
    """All an agent needs to begin. ``*_fd`` are numbers of inherited descriptors, -1 where the platform has none."""

    key: bytes
    mark: str  # value of config.MARK_VARIABLE for every process below the agent
    kernel_pid: int
    kernel_fd: int  # a pidfd of the kernel
    lifeline_fd: int  # held by agent and guard alone: end of file tells the kernel that both are gone
    output_fds: tuple[int, int]  # where workers without files write: stdout, stderr
    directory: str
    orders: str
    reports: str
    rendezvous: str
    environ: dict[str, str]  # whole environment of the zygote, the mark apart
    python_path: list[str]  # for the zygote's imports
    preload: list[str]
    worker_module: str
    in_background: bool  # nobody waits for the zygote yet: its imports give way to all else
    beat_s: float
    stop_grace_s: float
    worker_hello_s: float
    linger_s: float
    faults: str = ""  # transport/faults.py
    curve: CurveKeys | None = None  # where orders and reports are TCP's


# --- agent to zygote and back, over their socket pair (length-prefixed)


class ZygoteSpec(Message, frozen=True):
    """First message to the zygote: what to import. Answered by Ready, or by its end."""

    agent_pid: int
    python_path: list[str]
    preload: list[str]
    worker_module: str
    in_background: bool = False


class ForkWorker(Message, frozen=True):
    """Fork; the child becomes the agent's own child. ``spec`` is a WorkerSpec, encoded."""

    process: int
    spec: bytes


class Forked(Message, frozen=True):
    process: int
    pid: int


class ForkFailed(Message, frozen=True):
    process: int
    text: str


class Ready(Message, frozen=True):
    torch: str
    seconds: float


ToZygote = ZygoteSpec | ForkWorker
FromZygote = Forked | ForkFailed | Ready


class WorkerSpec(msgspec.Struct, frozen=True):
    """All a worker needs to begin. Reaches it over the zygote's socket pair, never by argv or environment."""

    mesh: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    device: str  # "cpu" or "cuda"
    key: bytes
    agent_pid: int
    kernel_pid: int
    orders: str  # addresses of the kernel's sockets
    reports: str
    rendezvous: str  # a directory of the mesh's own, for process groups
    seed: int
    env: dict[str, str]
    stdout_path: str
    stderr_path: str
    python_path: list[str]
    cwd: str
    without: list[str] = []  # variables of the zygote that this worker is not to have
    output_fds: tuple[int, int] = (-1, -1)  # where it writes where it has no path: stdout, stderr
    gpus: int = 0  # of the mesh; rank R has number R modulo this
    process: int = 0  # the supervisor's number for it: names its report socket
    worker_module: str = "monarch_lab.worker.main"
    hello_s: float = 150.0  # how long it waits for the kernel's Welcome
    linger_s: float = 1.0  # how long its last reports may take to leave when it closes
    curve: CurveKeys | None = None  # where orders and reports are TCP's
