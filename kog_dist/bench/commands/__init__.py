"""One file per subcommand of `kog-bench`: its options, what is wrong with them, and the call of the benchmark.

Benchmarks are imported inside the functions, so that `--help` answers at once.
"""
