"""The gateway: agents that speak a chat protocol, in front of a sampler, recorded in exact ids."""
