"""Samplers over HTTP: the protocol, the client, a sampler that sends its requests with the client, and the server."""
