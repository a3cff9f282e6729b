"""The chat protocols, as pure functions on requests and responses, and a client for OpenAI-compatible servers."""
