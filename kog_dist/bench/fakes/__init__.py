"""What stands in for a model, a rank, an engine or a replica in benchmarks and tests."""
