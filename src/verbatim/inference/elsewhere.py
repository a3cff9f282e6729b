"""What our servers do as vLLM's do, in whose processes Verbatim is not installed: how the key of a request is read and
compared, and how weights come in over HTTP. The files lie with vLLM's plugin, whose folder such a process has in its
PYTHONPATH; they use only the standard library."""

from verbatim.inference.vllm.plugin.verbatim_keys import is_key, key_of
from verbatim.inference.vllm.plugin.verbatim_uploads import PREFIX, sha256, take

__all__ = ["PREFIX", "is_key", "key_of", "sha256", "take"]
