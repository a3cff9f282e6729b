"""Code that our own servers share with the vLLM plug-in: reading and comparing API keys, and receiving weight uploads.

The modules are in the plug-in's folder and use only the standard library, because a vLLM process has that folder on its
PYTHONPATH but cannot import Verbatim."""

from verbatim.inference.vllm.plugin.verbatim_keys import is_key, key_of
from verbatim.inference.vllm.plugin.verbatim_uploads import PREFIX, sha256, take

__all__ = ["PREFIX", "is_key", "key_of", "sha256", "take"]
