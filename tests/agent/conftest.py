from tests.supervisor.conftest import start_mesh

__all__ = ["start_mesh"]
