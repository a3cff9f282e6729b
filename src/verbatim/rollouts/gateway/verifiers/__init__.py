"""Runs environments of the package `verifiers` with its tasks, programs and rewards, and our sampler and recorder."""
