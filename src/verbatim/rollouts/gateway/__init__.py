"""The gateway: serves a sampler to agents over chat protocols, and records their turns in exact ids."""

from verbatim.rollouts.gateway.gateway import Gateway, GatewayEpisode
from verbatim.rollouts.gateway.threads import BranchReason

__all__ = ["BranchReason", "Gateway", "GatewayEpisode"]
