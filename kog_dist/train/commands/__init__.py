"""One file per subcommand of `python -m kog_dist.train`: a typed function whose return value is printed as JSON.

Heavy packages are imported inside the functions, so that `--help` answers at once.
"""
