"""Which outcomes should get a branch? Rounds of a real pair, recorded and replayed."""
