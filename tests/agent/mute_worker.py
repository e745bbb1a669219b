import threading


def run(spec: object) -> None:
    threading.Event().wait()
