"""Computes the results of evaluated episodes: success, reward and pass@k with intervals, and paired differences."""
