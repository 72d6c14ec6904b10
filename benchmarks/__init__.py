"""One script per claim. Each prints its tables and writes them to `benchmarks/results/NAME.json`."""
