"""Pictures of what was measured, made from the tables in benchmarks/results."""
