"""The records that every other package uses: turns, trajectories, training samples, the ledger, errors.

Input: ids, logprobs and versions from a sampler. Output: frozen records, and the training samples of a trajectory.
Read first: `records/turn.py`, then `trajectories/samples.py`. Imports no other package of the project.
"""
