"""The training loop: rollouts, batches, weights, evaluation, checkpoints."""
