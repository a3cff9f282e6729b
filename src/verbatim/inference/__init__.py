"""Samples completions: exact ids in; exact ids, logprobs and policy versions out.

In: a `SampleRequest`. Out: a `Completion`. New weights arrive through `update_weights`. `embedded` runs the model in
this process, `http` has the client and the server, `chat` the chat protocols, `vllm` starts vLLM servers, and `pool`
puts several replicas behind one sampler. Read first: `sampler.py`, then `embedded/decoder.py`; tokens are sampled, with
their logprobs, in `embedded/sampling.py`, or by the compiled kernel (`draw_row` in `embedded/compiled/kernel.c`).
Imports `core`, `config`, `models`.
"""

from verbatim.core.sampling import SamplingParams
from verbatim.inference.backends import SAMPLERS, BackendInputs
from verbatim.inference.sampler import Completion, Sampler, SampleRequest

__all__ = ["SAMPLERS", "BackendInputs", "Completion", "SampleRequest", "Sampler", "SamplingParams"]
