"""Rollout engines: exact ids in, exact ids, logprobs and policy versions out."""

from verbatim.inference.base import Completion, Sampler, SampleRequest, SamplingParams

SAMPLERS = {
    "torch": "verbatim.inference.embedded.engine:TorchSampler",
    "scripted": "verbatim.inference.scripted:ScriptedSampler",
}
"""Where each backend lives: heavy libraries load with the one that is used."""

__all__ = ["SAMPLERS", "Completion", "SampleRequest", "Sampler", "SamplingParams"]
