"""Rollout engines and episodes in other processes: of this machine, or of a Ray cluster."""
