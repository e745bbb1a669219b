"""The rules of the supervision library: hosts and agents are matched, processes kept, the silent given up.

Pure: ``handle(event, now)`` changes the records and returns what is to be done; the loop does it. No sockets, no
clock, no threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from monarch_lab.errors import ProtocolError
from monarch_lab.supervisor.core_events import (
    Action,
    AgentEnded,
    AgentStarted,
    Announce,
    EndProcess,
    Event,
    Fence,
    GroupLaunched,
    HostsRequested,
    HostsReturned,
    LetterSent,
    LetterTaken,
    PassOn,
    PeerBroken,
    PeerFenced,
    PeerJoined,
    PeerReported,
    Release,
    ShutdownAsked,
    SignalSent,
    StartAgents,
    Tell,
    Ticked,
    Warn,
)
from monarch_lab.supervisor.host_states import LIVE_HOST, HostEvent, HostState, ProcessEvent, move_host, move_process
from monarch_lab.supervisor.letters import (
    HostConnected,
    HostDisconnected,
    ProcessExited,
    ProcessFailedToStart,
    ProcessStarted,
)
from monarch_lab.supervisor.records import (
    Counters,
    HostRecord,
    HostTimes,
    Peer,
    PeerState,
    ProcessRecord,
    obituary,
    who,
)
from monarch_lab.wire.hosts import (
    ChildExited,
    ChildLetter,
    ChildNote,
    ChildNotStarted,
    ChildStarted,
    ChildTook,
    DeliverLetter,
    GrantCredit,
    HostStopped,
    HostTerms,
    Order,
    Report,
    SignalProcesses,
    StopHost,
)

# A loop that comes so many beats late has been asleep itself: silence then says nothing about others.
STALL_BEATS = 3


class SupervisorCore:
    def __init__(self, times: HostTimes) -> None:
        self.counters = Counters()
        self.hosts: dict[int, HostRecord] = {}  # those that live
        self.peers: dict[int, Peer] = {}
        self.stopping = False
        self._times = times
        self._unattached: deque[HostRecord] = deque()
        self._waiting: deque[Peer] = deque()
        self._coming: set[int] = set()  # agents that we started and that have not joined
        self._processes: dict[int, ProcessRecord] = {}
        self._issued = 0  # process numbers below this were given out
        self._last_tick: float | None = None
        self._next_round = float("-inf")
        self._no_verdict_before = float("-inf")
        self._actions: list[Action] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case PeerReported():
                self._take_reports(event, now)
            case LetterTaken():
                self._grant(event)
            case LetterSent():
                self._send(event)
            case Ticked():
                self._tick(event.silence_of, now)
            case GroupLaunched():
                self._launch(event)
            case SignalSent():
                for host, processes in _by_host(event.processes):
                    self._order(host, SignalProcesses(processes, event.signal, event.group))
            case HostsRequested():
                self._request(event.hosts, now)
            case HostsReturned():
                for host in event.hosts:
                    self._return(host, event.error, now)
            case PeerJoined():
                self._join(event, now)
            case PeerBroken():
                self._break(event.peer, event.text, now)
            case PeerFenced():
                self._break(event.peer, event.text, now, fence=False)
            case AgentStarted():
                self._coming.add(event.peer)
            case AgentEnded():
                self._end_agent(event, now)
            case ShutdownAsked():
                self._shut_down(now)
        actions, self._actions = self._actions, []
        return actions

    @property
    def is_empty(self) -> bool:
        """Every agent is gone: a shutdown has come to its end."""
        return not self.peers

    @property
    def hosts_waiting(self) -> int:
        return len(self._unattached)

    @property
    def peers_waiting(self) -> int:
        return len(self._waiting)

    def silences(self, silence_of: Callable[[int], float]) -> list[float]:
        return [silence_of(peer.ident) for peer in self.peers.values() if peer.state is PeerState.SERVING]

    # --- hosts and agents

    def _request(self, hosts: Sequence[HostRecord], now: float) -> None:
        for host in hosts:
            self.hosts[host.ident] = host
            if self.stopping:
                self._close(host, HostEvent.RETURNED, "the context was shut down", now)
            else:
                self._unattached.append(host)
        # Whoever waits has no host older than these.
        missing = len(hosts) - len(self._waiting)
        self._match()
        if missing > 0 and not self.stopping:
            self._actions.append(StartAgents(missing))

    def _join(self, event: PeerJoined, now: float) -> None:
        if event.peer in self.peers:
            self._break(event.peer, "its agent started anew", now, fence=False)
        self._coming.discard(event.peer)
        peer = Peer(event.peer, event.hostname)
        self.peers[peer.ident] = peer
        self._actions.append(Tell(peer.ident, HostTerms(self._times.lease, self._times.stop_grace)))
        if self.stopping:
            self._stop_peer(peer, None, now)
            return
        self._waiting.append(peer)
        self._match()

    def _match(self) -> None:
        """First come, first served, on both sides."""
        while self._unattached and self._waiting:
            host, peer = self._unattached.popleft(), self._waiting.popleft()
            host.state = move_host(host.state, HostEvent.JOINED)
            host.hostname, host.peer = peer.hostname, peer.ident
            peer.host, peer.state = host, PeerState.SERVING
            self._actions.append(Announce(host, HostConnected(peer.hostname)))
            pending, host.pending = host.pending, []
            self._actions += [Tell(peer.ident, order, payload) for order, payload in pending]

    def _return(self, host: HostRecord, error: str | None, now: float) -> None:
        if host.state not in LIVE_HOST:
            return
        peer = None if host.peer is None else self.peers[host.peer]
        self._close(host, HostEvent.RETURNED, error or "", now)
        if peer is not None:
            self._stop_peer(peer, error, now)

    def _stop_peer(self, peer: Peer, error: str | None, now: float) -> None:
        peer.state, peer.host = PeerState.STOPPING, None
        peer.stop_by = now + self._times.stop
        self._actions.append(Tell(peer.ident, StopHost(self._times.stop_grace, error)))

    def _break(self, ident: int, text: str, now: float, fence: bool = True, final: bool = False) -> None:
        """Give a peer up, and the host it was."""
        peer = self.peers.pop(ident, None)
        if peer is None:
            return
        if peer.state is PeerState.WAITING:
            self._waiting.remove(peer)
        if peer.host is not None:
            self._close(peer.host, HostEvent.GIVEN_UP, text, now)
        if fence:
            self._actions.append(Fence(ident, text, final or peer.state is PeerState.STOPPING))

    def _end_agent(self, event: AgentEnded, now: float) -> None:
        self._break(event.peer, event.text, now, final=True)
        self._coming.discard(event.peer)
        if len(self._unattached) > len(self._coming):
            # It never came, and no other is on its way for the oldest of those that were asked for.
            self._close(self._unattached[0], HostEvent.GIVEN_UP, event.text, now)

    def _close(self, host: HostRecord, how: HostEvent, reason: str, now: float) -> None:
        """The end of a host, told once: first its processes, then itself."""
        if host.state is HostState.UNATTACHED and host in self._unattached:
            self._unattached.remove(host)
        host.state = move_host(host.state, how)
        host.reason = reason
        host.peer = None
        host.pending.clear()
        del self.hosts[host.ident]
        for process in list(host.processes.values()):
            self._abort(process)
        self._actions.append(Announce(host, HostDisconnected(now, reason)))

    def _shut_down(self, now: float) -> None:
        self.stopping = True
        for host in list(self.hosts.values()):
            self._return(host, None, now)
        while self._waiting:
            self._stop_peer(self._waiting.popleft(), None, now)

    # --- processes

    def _launch(self, event: GroupLaunched) -> None:
        for process in event.processes:
            self._processes[process.ident] = process
            event.host.processes[process.ident] = process
        self._issued = max(self._issued, event.processes[-1].ident + 1)
        self.counters.launches += len(event.processes)
        if event.host.state not in LIVE_HOST:
            for process in event.processes:
                self._abort(process)
            return
        self._order(event.host, event.order, event.call)

    def _send(self, event: LetterSent) -> None:
        self.counters.sends += 1
        for host, processes in _by_host(event.processes):
            self._order(host, DeliverLetter(processes), event.payload)

    def _grant(self, event: LetterTaken) -> None:
        if event.process.ident in self._processes:
            self._order(event.process.host, GrantCredit(event.process.ident, event.size))

    def _order(self, host: HostRecord, order: Order, payload: bytes = b"") -> None:
        if host.peer is not None:
            self._actions.append(Tell(host.peer, order, payload))
        elif host.state is HostState.UNATTACHED:
            host.pending.append((order, payload))

    def _take_reports(self, event: PeerReported, now: float) -> None:
        peer = self.peers.get(event.peer)
        if peer is None:
            return
        for report, payload in event.reports:
            if isinstance(report, HostStopped):
                self._stopped(peer, now)
                return
            if peer.state is PeerState.STOPPING:
                continue  # its processes were reported when it was given back
            if peer.host is None:
                self._break(peer.ident, f"{type(report).__name__} from an agent that serves no host", now)
                return
            process = peer.host.processes.get(report.process)
            if process is not None:
                try:
                    self._take(process, report, payload)
                except ProtocolError as e:
                    self._break(peer.ident, str(e), now)
                    return
            elif 0 <= report.process < self._issued:
                self.counters.dropped += isinstance(report, ChildLetter)
            else:
                self._break(peer.ident, f"it speaks of process {report.process}, which nobody asked for", now)
                return

    def _stopped(self, peer: Peer, now: float) -> None:
        if peer.state is not PeerState.STOPPING:
            self._break(peer.ident, "its agent has ended", now)
            return
        del self.peers[peer.ident]
        self._actions.append(Fence(peer.ident, "", final=True))

    def _take(self, process: ProcessRecord, report: Report, payload: bytes) -> None:
        match report:
            case ChildLetter():
                self.counters.responses += 1
                self._actions.append(PassOn(process, payload))
            case ChildTook():
                self._actions.append(Release(process.ident, report.size))
            case ChildStarted():
                process.state = move_process(process.state, ProcessEvent.STARTED)
                process.pid = report.pid
                self.counters.starts += 1
                self._actions.append(Announce(process, ProcessStarted(report.pid)))
            case ChildNotStarted():
                process.state = move_process(process.state, ProcessEvent.NOT_STARTED)
                self._finish(process, ProcessFailedToStart(report.text), f"{who(process)} could not be started")
            case ChildExited():
                process.state = move_process(process.state, ProcessEvent.EXITED)
                process.returncode = report.code
                self._finish(process, report.code, obituary(process, report))
            case ChildNote():
                self._actions.append(Warn(f"{who(process)}: {report.text}"))

    def _abort(self, process: ProcessRecord) -> None:
        process.state = move_process(process.state, ProcessEvent.HOST_GONE)
        why = process.host.reason or ("it was given back" if process.host.state is HostState.CLOSED else "")
        text = f"{who(process)} is gone with its host" + (f": {why}" if why else "")
        self._finish(process, ConnectionAbortedError(text), text)

    def _finish(self, process: ProcessRecord, result: int | Exception, message: str) -> None:
        self.counters.exits += 1
        self.counters.deletions += 1
        del self._processes[process.ident], process.host.processes[process.ident]
        self._actions += [EndProcess(process.ident), Announce(process, ProcessExited(result, message))]

    # --- silence

    def _tick(self, silence_of: Callable[[int], float], now: float) -> None:
        late = 0.0 if self._last_tick is None else now - self._last_tick
        self._last_tick = now
        if late > STALL_BEATS * self._times.beat:
            # We ourselves were asleep: what was sent meanwhile gets a full grace to be heard.
            self._no_verdict_before = now + self._times.lost
        if now < self._next_round:
            return
        self._next_round = now + self._times.beat / 2
        for peer in list(self.peers.values()):
            if now >= peer.stop_by:
                self._break(peer.ident, "it did not stop in time", now)
            else:
                self._judge(peer, silence_of(peer.ident), now)

    def _judge(self, peer: Peer, silence: float, now: float) -> None:
        host = peer.host
        if silence >= self._times.unreachable and now < self._no_verdict_before:
            return
        if silence >= self._times.lost:
            self._break(peer.ident, f"nothing was heard of {peer.hostname or 'its agent'} for {silence:.1f} s", now)
        elif host is not None and host.state is HostState.ATTACHED and silence >= self._times.unreachable:
            host.state = move_host(host.state, HostEvent.SILENT)
        elif host is not None and host.state is HostState.UNREACHABLE and silence < self._times.unreachable:
            host.state = move_host(host.state, HostEvent.HEARD)


def _by_host(processes: Sequence[ProcessRecord]) -> list[tuple[HostRecord, list[int]]]:
    found: dict[int, tuple[HostRecord, list[int]]] = {}
    for process in processes:
        found.setdefault(process.host.ident, (process.host, []))[1].append(process.ident)
    return list(found.values())
