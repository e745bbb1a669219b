"""The claims in numbers: ``python -m tests.bench``. See docs/benchmarks.md."""
