"""Rollout engines and episodes in the processes of a Ray cluster."""
