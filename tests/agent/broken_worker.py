def run(spec: object) -> None:
    raise RuntimeError("broken from the start")
