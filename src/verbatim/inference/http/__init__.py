"""Samplers over HTTP: the protocol, the client, a sampler that uses them, and the server."""
