"""The worker's loop: orders in, reports out, in order, until Exit.

Runs on: the main thread; the reader thread (control messages: interrupts and debugger lines) only rings it.
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from typing import Any

import torch
import torch.distributed  # noqa: F401  in the zygote, so that a worker's first group forms quickly

from monarch_lab import config
from monarch_lab.tensors import payload
from monarch_lab.transport.worker_link import WorkerLink
from monarch_lab.wire import engine as wire
from monarch_lab.wire.codec import Decoder, encode
from monarch_lab.wire.looking import Look
from monarch_lab.wire.supervision import WorkerSpec
from monarch_lab.worker import anomaly, callbacks, children, devices, failures, groups, lookup, mapped, randomness
from monarch_lab.worker.asking import Asking
from monarch_lab.worker.debugger import Debugger
from monarch_lab.worker.engine import Engine
from monarch_lab.worker.looking import look
from monarch_lab.worker.op_stream import OpStream
from monarch_lab.worker.output import CellStream, Flusher, Recorder
from monarch_lab.worker.randomness import Randomness
from monarch_lab.worker.spmd import Spmd
from monarch_lab.worker.streams import Streams, number_here

_orders = Decoder(wire.Order)
_controls = Decoder(wire.Control)
_ENDS = (wire.Done, wire.Learned, wire.LearnFailed, wire.Fetched, wire.FetchFailed, wire.SpmdEnded)


class Worker:
    def __init__(self, spec: WorkerSpec, link: WorkerLink) -> None:
        self._link = link
        self._rank = spec.rank
        self._randomness = Randomness(spec.seed)
        self.engine = Engine(spec.rank, self.report, self._randomness)
        self._hard = False  # an interrupt that stops torch's ops too has not been taken yet
        self._output = Recorder(
            lambda: self.engine.cell, lambda message: link.send(encode(message)), spec.stdout_path, spec.stderr_path
        )
        self._flusher = Flusher([self._output.tick, devices.MemoryTeller(self.report)])
        self._debugger = Debugger(
            self.report, self._flush, lambda: self.engine.in_user_code, number_here, lambda: self.engine.cell
        )
        self._asking = Asking(self.report, self._flush)
        failures.own_rank = spec.rank
        randomness.install(self._randomness)
        self.engine.callbacks.serve = self._serve
        callbacks.install(self.engine.callbacks)
        anomaly.install()
        self._resumed: dict[tuple[int, int], wire.Resume] = {}
        self._exiting = False
        groups.install(groups.Groups(spec.rank, spec.rendezvous, self.engine.known.meshes, spec.gpus))
        # A stream's engine brings the meshes that it was told of.
        self._streams_beside = Streams(
            self.engine, self._read, self._obey, lambda n: groups.Groups(spec.rank, spec.rendezvous, {}, spec.gpus, n)
        )
        self._next = self._read
        self._spmd = Spmd(self.engine, spec, self._flush, self._debugger)

    def report(self, message: Any, frames: Any = ()) -> None:
        if isinstance(message, _ENDS):
            # What was printed arrives before the answer that ends the cell. C code of torch's own ops can wait for the
            # next tick: a look at the log files would be a good part of a small batch.
            if OpStream.ran_user_code or not isinstance(message, wire.Done):
                OpStream.ran_user_code = False
                self._flush()
            else:
                self._output.flush_pieces()
            if released := self.engine.callbacks.take_released():
                self._link.send(encode(wire.Released(released)))
            if returned := mapped.take_returned():
                self._link.send(encode(returned))
        elif isinstance(message, wire.Displayed | wire.Cleared):
            self._flush()  # what was printed before stands above it
        self._link.send(encode(message), frames)

    def _flush(self) -> None:
        self._output.flush()

    def install(self) -> None:
        sys.stdout, sys.stderr = (CellStream(name, self._output) for name in ("stdout", "stderr"))
        self._output.watch_forks()
        signal.signal(signal.SIGINT, self._on_sigint)
        self._debugger.install()
        self._asking.install()
        self._spmd.shell.install()
        self._flusher.start()
        self._link.start_control(self._on_control)

    def _on_sigint(self, number: int, frame: Any) -> None:
        engine = self.engine
        if self._debugger.is_asking:  # it is told to leave, and pdb would swallow this
            return
        hard, self._hard = self._hard, False  # one that comes while nothing runs must not harden a later one
        if (engine.interruptible and (engine.in_user_code or hard)) or (hard and self._spmd.in_cell):
            engine.interruptible = engine.in_user_code = False
            self._output.interrupt()

    def _on_control(self, header: bytes) -> None:
        """Runs on: the reader thread."""
        match message := _controls(header):
            case wire.Interrupt(batch=batch, ident=ident, hard=hard):
                engine = self.engine
                engine.ended_batch = max(engine.ended_batch, batch)
                engine.ended_ident = max(engine.ended_ident, ident)
                if hard:
                    self._hard = True
                    engine.dropped_batch = max(engine.dropped_batch, batch)
                    engine.dropped_ident = max(engine.dropped_ident, ident)
                for other in self._streams_beside.engines():
                    other.ended_batch, other.ended_ident = engine.ended_batch, engine.ended_ident
                    other.dropped_batch, other.dropped_ident = engine.dropped_batch, engine.dropped_ident
                self._streams_beside.interrupt()
                self._debugger.leave_all()
                if hard:
                    self._spmd.stop_waiting()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                children.interrupt(hard)
            case wire.InputReply() as answer:
                self._asking.reply(answer)
            case wire.LookUp():
                lookup.answer(message, lambda: self._spmd.namespace, self.report)
            case wire.FreeSpmd(ident=ident):
                self._spmd.stop_waiting(ident)
            case Look() as order:
                self._link.send(encode(look(order, self.engine.cells, self._spmd)))
            case debugging:
                self._debugger.control(debugging)

    def run(self) -> None:
        while not self._exiting:
            self._step()

    def _step(self) -> None:
        order, frames = self._next()
        try:
            if isinstance(order, Exception):
                raise order
            if isinstance(order, wire.Exit):
                self._exiting = True
            elif isinstance(order, wire.OnStream):  # the first: from now on a thread reads for all of them
                self._streams_beside.start((order, frames))
                self._next = self._streams_beside.next
            else:
                self._obey(self.engine, order, frames)
        except KeyboardInterrupt:
            pass  # came too late for the op it was meant for
        except BaseException:
            self.report(wire.Crashed(traceback.format_exc()))

    def _serve(self, ident: int, serial: int) -> wire.Resume:
        """Obey orders until the kernel has answered a call of ours. On a GPU, autograd calls this on a thread of its
        own while the main thread waits for it."""
        self._flush()
        while (ident, serial) not in self._resumed:
            self._step()
            if self._exiting:
                raise SystemExit
        return self._resumed.pop((ident, serial))

    def _read(self) -> tuple[Any, list[Any]]:
        header, *frames = self._link.receive()
        try:
            return _orders(header), frames
        except Exception as e:
            return e, frames  # for whoever takes it to tell

    def _obey(self, engine: Engine, order: Any, frames: Any) -> None:
        """Runs on: the main thread for ``self.engine``, its own thread for another stream's."""
        match order:
            case wire.Batch():
                engine.run_batch(order)
            case wire.Together():
                engine.run_batch(order.batch)
                self._obey(engine, order.order, frames)
            case wire.Define():
                engine.define(order, frames)
            case wire.Learn():
                engine.learn(order)
            case wire.LearnBackward():
                engine.learn_backward(order)
            case wire.Place():
                engine.place(order, frames)
            case wire.Fetch():
                engine.fetch(order)
            case wire.CallAndFetch():
                engine.call_and_fetch(order)
            case wire.RunSpmd():
                self._spmd.run(order)
            case wire.PushSpmd():
                self._spmd.push(order, frames)
            case wire.PullSpmd():
                self._spmd.pull(order)
            case wire.SyncModules():
                self._spmd.sync(order)
            case wire.Poison():
                # Not by engine.mark: heard again, the kernel would take it for the cause of what fails later.
                engine.cells.update((ref, failures.Failed(order.failure)) for ref in order.refs)
            case wire.Retain():
                engine.retain(order.ref)
            case wire.Hook():
                engine.callbacks.hook(order)
            case wire.Unhook():
                engine.callbacks.unhook(order.handler)
            case wire.Resume():
                if engine.callbacks.is_asked(order.ident, order.serial):
                    self._resumed[order.ident, order.serial] = order
            case wire.Seed():
                self._randomness.seed(order.seed, order.scope)
            case wire.Vary():
                self._randomness.vary(order.level, order.seed, order.position)
            case wire.Rejoin():
                groups.current().rejoin(order.number, order.ranks)
                if self._rank in order.ranks and engine is self.engine:
                    engine.rejoin(order.lost)
            case wire.AdoptStreams():
                self._randomness.adopt(*payload.loads(frames))

    def close(self) -> None:
        self._flush()
        self._flusher.stop()


def run(spec: WorkerSpec) -> None:
    """Runs a worker until it is told to exit. Called in a process just forked from the zygote."""
    devices.open_device(spec)
    torch.set_num_threads(config.threads_of_worker(spec.local_world_size))
    link = WorkerLink(spec)
    worker = Worker(spec, link)
    link.connect()
    worker.install()
    try:
        worker.run()
    finally:
        worker.close()
        link.close()
