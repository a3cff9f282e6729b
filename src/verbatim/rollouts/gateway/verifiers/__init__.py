"""Runs environments of the package `verifiers`, with its tasks, programs and rewards, and with our sampler and
recorder."""
