"""monarch_lab: ours, asked as the others are."""

from _util import main


def two():
    import torch

    return torch.full((), 2)


class P:
    name = "monarch_lab"

    def start(self, n):
        import torch

        import monarch_lab as ml

        self.ml, self.torch, self.n = ml, torch, n
        self.mesh = ml.local_mesh(gpus_per_host=n, device="cpu")
        self.first = self.mesh.slice(gpu=0)
        self.two = ml.remote(two)
        with self.mesh.activate():
            torch.ones(2) + 1
        self.mesh.sync()

    def restart(self, n):
        self.mesh.exit()
        self.start(n)

    def pids(self):
        return [p.pid for p in self.mesh.status().processes]

    def trivial(self):
        with self.mesh.activate():
            return self.ml.fetch_all(self.two()).flatten().tolist()

    def func(self, f, *a):
        with self.mesh.activate():
            remote = self.ml.remote(f)
            futures = [
                remote.call_on_shard_and_fetch(rank, *a, shard={"host": 0, "gpu": rank}) for rank in range(self.n)
            ]
        waiting = list(futures)
        while waiting:  # whichever fails first is the error, as with ray.get of a list
            for future in [f for f in waiting if f.done()]:
                future.result()
                waiting.remove(future)
            if waiting:
                try:
                    waiting[0].result(timeout=0.01)
                except TimeoutError:
                    pass
        return [future.result() for future in futures]

    def prepare(self, mb):
        with self.first.activate():
            self.big = self.torch.arange(mb << 18, dtype=self.torch.float32)

    def fetch(self):
        return self.ml.inspect(self.big)

    def send(self, t):
        self.held = self.mesh.replicate(t)
        self.mesh.sync()

    def ops(self, k, sync):
        with self.first.activate():
            z, y = self.torch.zeros(16), self.torch.ones(16)
            for _ in range(k):
                z = z + y
                if sync:
                    self.ml.inspect(z)
        return float(self.ml.inspect(z)[0])

    def stop(self):
        self.mesh.exit()


if __name__ == "__main__":
    main(P)
