"""Computes what evaluated episodes come to: success, reward and pass@k with their intervals, and paired differences."""
