"""Pictures of the docs that show figures."""
