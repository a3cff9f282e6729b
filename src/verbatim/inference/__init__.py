"""Samples completions: exact ids in, exact ids, logprobs and policy versions out."""

from verbatim.inference.backends import SAMPLERS, BackendInputs
from verbatim.inference.base import Completion, Sampler, SampleRequest, SamplingParams

__all__ = ["SAMPLERS", "BackendInputs", "Completion", "SampleRequest", "Sampler", "SamplingParams"]
