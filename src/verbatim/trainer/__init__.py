"""Trains on samples: forward, loss, backward, update; saves what a run needs to resume."""
