"""Training samples to optimizer steps: forward, loss, backward, update, and what a run needs to go on."""
