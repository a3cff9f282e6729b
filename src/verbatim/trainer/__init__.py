"""Trains the policy: packs samples into micro-batches, runs forward, loss and backward, updates and publishes weights.

Input: training samples. Output: metrics, new weights, and a state to resume from. `transport` carries batches and
weights between processes and hosts. Read first: `step.py` (the gradient of one optimizer step),
`logprobs.py` (a target's logprob), then `trainer.py`. Imports `core`, `config`, `models`, `inference`, `algorithms`.
"""
