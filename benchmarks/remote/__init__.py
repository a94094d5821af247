"""A target here and its draft on another node: in a network namespace of its own on this machine."""
