"""Trains on samples: packs them (`packing`), forward, loss, backward, update, new weights.

In: training samples. Out: a report, new weights, and a state to resume from. `transport` carries batches and weights
between processes and hosts. Read first: `step.py`, `logprobs.py` (of a target's logprob), then `trainer.py`.
Imports `core`, `config`, `models`, `inference`, `algorithms`.
"""
