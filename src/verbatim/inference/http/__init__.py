"""Samplers over HTTP: the client, the protocol, the sampler that uses them, and the server."""
