"""The gateway: agents that speak a chat protocol, in front of a sampler, recorded in exact ids."""

from verbatim.rollouts.gateway.gateway import Gateway, GatewayEpisode
from verbatim.rollouts.gateway.threads import BranchReason

__all__ = ["BranchReason", "Gateway", "GatewayEpisode"]
