"""Runs environments of the package `verifiers`. The tasks, programs and rewards are the package's; the sampler and the
recorder are ours."""
