"""The sections of RESULTS.md, each made from the records under `benchmarks/results/`."""
