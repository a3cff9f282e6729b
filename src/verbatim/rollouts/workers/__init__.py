"""Episodes that run in other processes: the pool, what travels, and what is counted on the way."""
