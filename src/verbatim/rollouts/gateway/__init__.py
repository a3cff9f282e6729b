"""The gateway: agents that speak a chat protocol, in front of a sampler, recorded in exact ids."""

from verbatim.gateway.gateway import Gateway, GatewayEpisode
from verbatim.gateway.threads import BranchReason

__all__ = ["BranchReason", "Gateway", "GatewayEpisode"]
