"""What every other package speaks of: turns, trajectories, training samples, the ledger, errors.

In: ids, logprobs and versions as a sampler gave them. Out: frozen records, and the training samples of a trajectory.
Read first: `records/turn.py`, then `trajectories/samples.py`. Imports none of the others.
"""
