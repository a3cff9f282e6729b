"""Training samples to optimizer steps: forward, loss, backward, step, and what a run needs to go on."""
