"""The agent's loop: orders from the kernel, words of the zygote, ends of children, in; reports out.

Runs on: the agent's only thread. It waits in one poll and never blocks elsewhere, so that a second without a beat
means trouble of the machine, not of a worker.
"""

from __future__ import annotations

import hmac
import logging
import os
import platform as python_platform
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import NoReturn

import zmq

import monarch_lab
from monarch_lab.agent.children import Child, Children, last_lines, size_of, start_guard, start_zygote
from monarch_lab.agent.ending import end_everything
from monarch_lab.config import MARK_VARIABLE
from monarch_lab.errors import ProtocolError
from monarch_lab.transport import platform
from monarch_lab.transport.complaints import Complaints
from monarch_lab.transport.directory import STOP_ASKED, read_file, remove_directory
from monarch_lab.transport.door import show_keys
from monarch_lab.transport.doorbell import Doorbell
from monarch_lab.transport.faults import Faults, Point
from monarch_lab.transport.frames import configure, poll_ms, receive_frames, send_frames
from monarch_lab.transport.stream import MessageReader, pack, read_message
from monarch_lab.wire.codec import Decoder, encode
from monarch_lab.wire.supervision import (
    AgentEnding,
    AgentHello,
    AgentSpec,
    AgentStopped,
    Beat,
    Forked,
    ForkFailed,
    ForkWorker,
    FromZygote,
    LaunchWorker,
    Message,
    ProcessNotStarted,
    ProcessStarted,
    Ready,
    SignalProcess,
    StopAgent,
    ToAgent,
    Welcome,
    WorkerSpec,
    ZygoteFailed,
    ZygoteReady,
    ZygoteSpec,
)

log = logging.getLogger("monarch_lab.agent")
_decode_order = Decoder(ToAgent)
_decode_spec = Decoder(AgentSpec)
_decode_zygote = Decoder(FromZygote)


class AgentState(Enum):
    DEAF = auto()  # the kernel has not proved itself
    SERVING = auto()
    STOPPING = auto()  # workers were asked to end
    ENDED = auto()  # leave the loop


class ZygoteState(Enum):
    IMPORTING = auto()
    IDLE = auto()
    FORKING = auto()
    GONE = auto()


class Agent:
    def __init__(self, spec: AgentSpec, clean_environ: dict[str, str]) -> None:
        self._spec = spec
        self._clean_environ = clean_environ  # without the mark: for the guard
        self._state = AgentState.DEAF
        self._zygote_state = ZygoteState.IMPORTING
        self._zygote_log = os.path.join(spec.directory, "zygote.log")
        self._zygote_reader = MessageReader()
        self._tried_again = -1  # the process whose order outlived a zygote
        self._waiting: deque[LaunchWorker] = deque()
        self._stderr_bytes = 0  # of the file of the worker that is being forked
        self._children = Children()
        self._guard_pid = 0
        self._own_fd = platform.open_pidfd(os.getpid())
        self._signals = Doorbell()
        self._beat = 0
        self._next_beat = time.monotonic()
        self._stop_by = float("inf")
        self._complaints = Complaints()
        self._fork_faults: Point[None] | None = Faults(spec.faults).at("agent.fork")
        self._note = ""  # why it ended without being asked
        self._poller = zmq.Poller()
        self._handlers: dict[object, Callable[[], None]] = {}
        self._context = zmq.Context()
        self._kernel = self._context.socket(zmq.DEALER)
        self._kernel.setsockopt(zmq.IDENTITY, b"a0")
        configure(self._kernel, spec.linger_s)

    def run(self) -> None:
        """Returns when nothing is left of the mesh on this host."""
        platform.become_subreaper()
        signal.set_wakeup_fd(self._signals.button_fd, warn_on_full_buffer=False)
        # Python drops the byte of a signal that has no handler of its own.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._end_from_outside())
        try:
            self._start_guard()
            self._start_zygote()
            show_keys(self._kernel, self._spec.reports, self._spec.key, self._spec.curve)
            self._kernel.connect(self._spec.reports)
            version = python_platform.python_version()
            self._say(AgentHello(self._spec.key, python_platform.node(), os.getpid(), version, monarch_lab.__version__))
            self._loop()
        finally:
            self._clear_up()

    # --- the loop

    def _loop(self) -> None:
        self._listen_to(self._kernel, self._read_kernel)
        self._listen_to(sys.stdin.fileno(), lambda: self._end("the kernel closed its pipe"))
        self._listen_to(self._signals.fd, self._collect)
        if self._spec.kernel_fd >= 0:
            self._listen_to(self._spec.kernel_fd, lambda: self._end("the kernel has ended"))
        while self._state is not AgentState.ENDED:
            wake = min(self._next_beat, self._stop_by)
            for source, _ in self._poller.poll(poll_ms(wake - time.monotonic())):
                if source in self._handlers:  # one before it may have ended the zygote
                    self._handlers[source]()
            self._tick(time.monotonic())

    def _listen_to(self, source: object, handler: Callable[[], None]) -> None:
        self._handlers[source] = handler
        self._poller.register(source, zmq.POLLIN)

    def _tick(self, now: float) -> None:
        if now >= self._next_beat:
            self._next_beat = now + self._spec.beat_s
            self._beat += 1
            self._say(Beat(self._beat, self._children.usage()))
            if self._spec.kernel_fd < 0 and not platform.is_alive(self._spec.kernel_pid):
                self._end("the kernel has ended")
        if self._state is AgentState.STOPPING and (now >= self._stop_by or not len(self._children)):
            self._state = AgentState.ENDED

    def _end_from_outside(self) -> None:
        asked = read_file(self._spec.directory, STOP_ASKED, at_most=200) or b"SIGTERM"
        self._end(asked.decode(errors="replace"))

    def _end(self, note: str) -> None:
        self._note = note
        self._state = AgentState.ENDED

    # --- the kernel

    def _say(self, message: Message) -> None:
        send_frames(self._kernel, [encode(message)])

    def _read_kernel(self) -> None:
        while True:
            try:
                parts = receive_frames(self._kernel, wait=False)
            except zmq.Again:
                return
            try:
                self._handle_order(_decode_order(parts[0].buffer))
            except ProtocolError as e:
                if (line := self._complaints.note(b"kernel", str(e), time.monotonic())) is not None:
                    log.warning("%s", line)

    def _handle_order(self, order: Message) -> None:
        if self._state is AgentState.DEAF:
            if isinstance(order, Welcome) and hmac.compare_digest(order.key, self._spec.key):
                self._state = AgentState.SERVING
            else:
                log.warning("%s dropped: the kernel has not proved itself", type(order).__name__)
            return
        match order:
            case LaunchWorker():
                self._waiting.append(order)
                self._fork_next()
            case SignalProcess():
                self._children.signal(order.process, order.signal, order.group)
            case StopAgent():
                self._stop(order)
            case Welcome():
                pass  # sent again after a reconnect

    def _stop(self, order: StopAgent) -> None:
        self._state = AgentState.STOPPING
        self._stop_by = time.monotonic() + order.grace_s
        self._waiting.clear()
        self._children.signal_all(signal.SIGTERM)
        self._children.signal_all(signal.SIGCONT)  # a stopped process hears nothing before

    # --- the zygote

    def _start_zygote(self) -> None:
        spec = self._spec
        self._zygote_state = ZygoteState.IMPORTING
        self._zygote_reader = MessageReader()
        self._zygote_pid, self._zygote = start_zygote(
            {**spec.environ, MARK_VARIABLE: spec.mark}, self._zygote_log, spec.output_fds
        )
        self._listen_to(self._zygote.fileno(), self._read_zygote)
        in_background = spec.in_background and not self._waiting
        self._tell_zygote(ZygoteSpec(os.getpid(), spec.python_path, spec.preload, spec.worker_module, in_background))

    def _tell_zygote(self, message: Message) -> None:
        try:
            self._zygote.sendall(pack(encode(message)))
        except OSError:
            pass  # it has ended: told by the end of its stream

    def _read_zygote(self) -> None:
        try:
            data = self._zygote.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self._lose_zygote()
            return
        try:
            messages = [_decode_zygote(message) for message in self._zygote_reader.feed(data)]
        except ProtocolError as e:
            log.error("the zygote is ended, for what it says is no message: %s", e)
            platform.send_signal(self._zygote_pid, signal.SIGKILL)
            self._lose_zygote()
            return
        for message in messages:
            match message:
                case Ready() as ready:
                    self._say(ZygoteReady(self._zygote_pid, ready.torch, ready.seconds))
                case Forked() as forked:
                    self._take_worker(forked)
                case ForkFailed() as failed:
                    self._take_order(failed.process)
                    self._say(ProcessNotStarted(failed.process, failed.text))
            self._zygote_state = ZygoteState.IDLE
            self._fork_next()

    def _lose_zygote(self) -> None:
        """Its workers live on. The next order to fork has another one started."""
        before, self._zygote_state = self._zygote_state, ZygoteState.GONE
        self._poller.unregister(self._zygote.fileno())
        del self._handlers[self._zygote.fileno()]
        self._zygote.close()
        text = last_lines(self._zygote_log) or "the zygote ended without a word"
        log.error("the zygote has ended: %s", text)
        self._say(ZygoteFailed(text))
        if before is ZygoteState.IMPORTING:
            while self._waiting:
                self._say(ProcessNotStarted(self._waiting.popleft().process, text))
        elif before is ZygoteState.FORKING and self._waiting:
            # As a rule it was dead before the order reached it: the next one gets the order, once.
            if self._tried_again != (order := self._waiting[0]).process:
                self._tried_again = order.process
            else:
                self._waiting.popleft()
                self._say(ProcessNotStarted(order.process, "two zygotes ended while they forked it"))
        self._fork_next()

    def _fork_next(self) -> None:
        """One fork at a time: the pair's buffers never fill, and the agent never blocks on them."""
        if not self._waiting or self._state is not AgentState.SERVING:
            return
        if self._zygote_state is ZygoteState.GONE:
            self._start_zygote()
        elif self._zygote_state is ZygoteState.IDLE:
            order = self._waiting[0]
            if self._fork_faults is not None and self._fork_faults.strike() is not None:
                self._waiting.popleft()
                self._say(ProcessNotStarted(order.process, "a fault at agent.fork was asked for"))
                return self._fork_next()
            self._zygote_state = ZygoteState.FORKING
            # The worker before it under this rank wrote to the same file.
            self._stderr_bytes = size_of(order.stderr_path)
            self._tell_zygote(ForkWorker(order.process, encode(self._worker_spec(order))))

    def _take_worker(self, forked: Forked) -> None:
        order = self._take_order(forked.process)
        child = Child(forked.process, forked.pid, order.stderr_path if order else "", self._stderr_bytes)
        exited = self._children.add(child)
        self._say(ProcessStarted(forked.process, forked.pid))
        if exited is not None:
            self._say(exited)
        elif self._state is not AgentState.SERVING:
            self._children.signal(forked.process, signal.SIGKILL)

    def _take_order(self, process: int) -> LaunchWorker | None:
        """The order the zygote has answered; None when stop() has dropped it meanwhile."""
        if self._waiting and self._waiting[0].process == process:
            return self._waiting.popleft()
        return None

    def _worker_spec(self, order: LaunchWorker) -> WorkerSpec:
        spec, mesh = self._spec, order.mesh
        return WorkerSpec(
            mesh=mesh.name,
            rank=order.rank,
            world_size=mesh.world_size,
            local_rank=order.local_rank,
            local_world_size=order.local_world_size,
            host=order.host,
            device=mesh.device,
            gpus=mesh.gpus,
            key=spec.key,
            agent_pid=os.getpid(),
            kernel_pid=spec.kernel_pid,
            orders=spec.orders,
            reports=spec.reports,
            rendezvous=spec.rendezvous,
            seed=mesh.seed,
            env=order.env,
            stdout_path=order.stdout_path,
            stderr_path=order.stderr_path,
            python_path=mesh.python_path,
            cwd=mesh.cwd,
            without=order.without,
            output_fds=spec.output_fds,
            process=order.process,
            worker_module=spec.worker_module,
            hello_s=spec.worker_hello_s,
            linger_s=spec.linger_s,
            curve=order.curve,
        )

    # --- children

    def _collect(self) -> None:
        self._signals.answer()
        workers, others = self._children.collect(expecting=self._zygote_state is ZygoteState.FORKING)
        for exited in workers:
            self._say(exited)
        for pid, code in others:
            if pid == self._guard_pid and self._state is not AgentState.ENDED:
                log.error("the guard has ended (%d); another is started", code)
                self._start_guard()

    def _start_guard(self) -> None:
        spec = self._spec
        own_fd = -1 if self._own_fd is None else self._own_fd
        args = [spec.kernel_pid, spec.kernel_fd, os.getpid(), own_fd, MARK_VARIABLE, spec.mark, spec.directory]
        fds = [spec.kernel_fd, own_fd, spec.lifeline_fd]
        self._guard_pid = start_guard(self._clean_environ, [str(arg) for arg in args], fds)

    # --- the end

    def _clear_up(self) -> None:
        """Nothing below the agent is left, then nothing of the directory, then the kernel is told."""
        if self._note:
            log.warning("ending: %s", self._note)
            self._say(AgentEnding(self._note))
        self._state = AgentState.ENDED
        grace = self._spec.stop_grace_s
        if end_everything(self._spec.mark, {self._guard_pid}, grace, self._collect):
            # The rest is dead and collected: the guard has nothing left to do.
            end_everything(self._spec.mark, (), grace, self._collect)
            remove_directory(self._spec.directory)
            self._say(AgentStopped())
        # To a kernel that is gone there is nothing left to say.
        kernel_lives = platform.is_alive(self._spec.kernel_pid)
        self._context.destroy(linger=int(self._spec.linger_s * 1000) if kernel_lives else 0)


def main() -> NoReturn:
    for sig in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s agent %(levelname)s %(message)s", stream=sys.stderr)
    first = read_message(sys.stdin.fileno())
    if first is None:
        raise SystemExit("the kernel ended before it said what to do")
    Agent(_decode_spec(first), dict(os.environ)).run()
    # At once: zmq's and the interpreter's own ending have nothing to add, and the kernel waits.
    logging.shutdown()
    os._exit(0)
