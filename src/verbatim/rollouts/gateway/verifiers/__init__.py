"""Runs environments of the package `verifiers`: its tasks, programs and rewards, our sampler and records."""
