#!/usr/bin/env python3
"""torchmonarch alone, for the claims that name it: one JSON line after PROBE. Runs in its own environment.

monarch_probe.py ops          adds in a row on the tensor engine, one process: us_per_op
monarch_probe.py round-trip   a constant endpoint on 4 processes: ms, p99_ms
"""

import argparse
import json
import os
import statistics
import sys
import time

import torch
from monarch.actor import Actor, endpoint, this_host


class Constant(Actor):
    @endpoint
    def two(self):
        return 2


def ops(quick):
    import monarch

    count, runs = (100, 3) if quick else (500, 5)
    processes = this_host().spawn_procs(per_host={"gpus": 1})
    times = []
    for turn in range(runs + 1):
        with processes.activate():
            z, y = torch.zeros(16), torch.ones(16)
            monarch.fetch_shard(z).get()
            began = time.perf_counter()
            for _ in range(count):
                z = z + y
            value = monarch.fetch_shard(z).get()
            took = time.perf_counter() - began
        assert float(value[0]) == count, value
        if turn:
            times.append(took * 1e6 / count)
    processes.stop().get()
    return {"us_per_op": statistics.median(times), "runs": runs, "ops": count}


def round_trip(quick):
    processes = this_host().spawn_procs(per_host={"gpus": 4})
    actors = processes.spawn("constant", Constant)
    times = []
    for _ in range(20 + (100 if quick else 500)):
        began = time.perf_counter()
        got = [value for _, value in actors.two.call().get()]
        times.append((time.perf_counter() - began) * 1e3)
        assert got == [2] * 4, got
    times = sorted(times[20:])
    processes.stop().get()
    return {"ms": statistics.median(times), "p99_ms": times[int(len(times) * 0.99)], "calls": len(times)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("ops", "round-trip"))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = ops(options.quick) if options.what == "ops" else round_trip(options.quick)
    print("PROBE " + json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)  # its threads do not always end
