"""Samplers over HTTP: one client, one protocol, the sampler that uses them, and the server."""
