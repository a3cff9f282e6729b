"""A small tokenizer for each model family: one id per byte, the family's special tokens, and its chat template.

The chat templates are the published ones (data/trl_templates/README.md). No template of GLM-5, Kimi K2, Kimi K2.5 or
MiniMax M2 can be had without the model hub: those families are tested against prompts that are written down.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import renderers
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from verbatim.core.errors import ModelError
from verbatim.models.renderers import create_renderer
from verbatim.models.renderers.tool_support import COMPLETE

TEMPLATES = Path(__file__).parent / "data" / "trl_templates"


@dataclass(frozen=True)
class Family:
    """What tells one family from another."""

    special: tuple[str, ...]
    """Tokens that decoding for people leaves out."""
    markup: tuple[str, ...]
    """Added tokens that are not special."""
    eos: str
    """The end of sequence."""
    template: str | None = None
    """The file of its chat template."""
    bos: str | None = None
    """Written by the template itself."""


def _deepseek(name):
    return f"<｜{name.replace(' ', '▁')}｜>"


THINK = ("<think>", "</think>")
HERMES = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", *THINK)
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM_MARKUP = (*HERMES, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
KIMI = (
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|im_end|>",
    "[EOS]",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
KIMI_MEDIA = ("<|endoftext|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>")
DEEPSEEK = tuple(map(_deepseek, (
    "begin of sentence", "end of sentence", "User", "Assistant", "tool calls begin", "tool calls end",
    "tool call begin", "tool call end", "tool sep", "tool outputs begin", "tool outputs end", "tool output begin",
    "tool output end",
)))  # fmt: skip
HARMONY = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>")

FAMILIES = {
    "qwen3": Family(CHATML, HERMES, "<|im_end|>", "qwen3"),
    "qwen3-vl": Family(CHATML + VISION, HERMES, "<|im_end|>", "qwen3_vl"),
    "qwen3.5": Family(CHATML + VISION, HERMES, "<|im_end|>", "qwen3_5_think"),
    "glm-5": Family(GLM, GLM_MARKUP, "<|endoftext|>"),
    "glm-4.5": Family(GLM, GLM_MARKUP, "<|endoftext|>", "glm4moe"),
    "minimax-m2": Family(("]~!b[", "]~b]", "[e~["), ("<minimax:tool_call>", "</minimax:tool_call>", *THINK), "[e~["),
    "deepseek-v3": Family(DEEPSEEK, (), DEEPSEEK[1], "deepseekv3", DEEPSEEK[0]),
    "kimi-k2": Family(KIMI, (), "[EOS]"),
    "kimi-k2.5": Family(KIMI + KIMI_MEDIA, THINK, "[EOS]"),
    "nemotron-3": Family(CHATML, HERMES, "<|im_end|>", "nemotron_3_nano"),
    "gpt-oss": Family(HARMONY, (), "<|return|>", "gptoss"),
}
"""The eleven that are promised, in the order of the documents."""

MORE = {
    "qwen3.6": Family(CHATML + VISION, HERMES, "<|im_end|>", "qwen3_6"),
    "qwen3.8": Family(CHATML + VISION, HERMES, "<|im_end|>", "qwen3_8"),
    "nemotron-3-ultra": Family(CHATML, HERMES, "<|im_end|>", "nemotron_3_ultra"),
    "llama-3": Family(LLAMA, (), "<|eot_id|>", "llama3_1", "<|begin_of_text|>"),
}
"""Others whose chat template can be had."""


@cache
def family_tokenizer(name):
    """The same object every time: not to be changed."""
    family = {**FAMILIES, **MORE}[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.markup])
    template = (TEMPLATES / f"{family.template}.jinja").read_text(encoding="utf-8") if family.template else None
    if name == "deepseek-v3":
        # The file is the one for R1, which differs by the thought that a generation prompt opens.
        template = template.replace("<think>\\n", "")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=family.eos, bos_token=family.bos, chat_template=template
    )


@cache
def family_renderer(name):
    renderer = create_renderer(name, family_tokenizer(name))
    if name == "deepseek-v3":  # shows no tools, so a run refuses them; the rest is tested all the same
        renderer.tool_support = COMPLETE
    return renderer


WITHOUT_TEMPLATE = (
    "prime-qwen3",
    "deepseek-r1",
    "deepseek-v4",
    "gemma4",
    "glm-5.1",
    "glm-5.3",
    "hy3",
    "inkling",
    "laguna-m.1",
    "laguna-s-2.1",
    "laguna-xs-2.1",
    "laguna-xs.2",
    "nemotron-3.5",
)
"""The rest of the package's families. No template of theirs can be had; what they write is read back."""
TOKENS_OF = {"prime-qwen3": "qwen3.5", "nemotron-3.5": "nemotron-3"}
"""Of these the family with the same tokens."""
_TOKEN = re.compile(r"""["'`](<[^"'`\s<>]{1,40}>|[<〈]/?[|｜][^\s"'`<>〈〉]{1,40}[|｜][>〉]|\[[A-Za-z]+\])["'`]""")


@cache
def source_renderer(name):
    """With the tokens that the sources of the package name; those of other families do not matter to it."""
    if name in TOKENS_OF:
        return create_renderer(name, family_tokenizer(TOKENS_OF[name]))
    tokens = {"<bos>", "<eos>", "<pad>", "｜DSML｜", '<|"|>'}
    for file in sorted(Path(renderers.__file__).parent.glob("*.py")):
        tokens |= {token for token in _TOKEN.findall(file.read_text(encoding="utf-8")) if "{" not in token}
    while True:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(token, special=True) for token in sorted(tokens)])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", bos_token="<bos>")
        try:
            return create_renderer(name, tokenizer)
        except ModelError as error:  # its name is put together in the source
            named = set(re.findall(r"'([^']+)'(?:,| not found)", str(error))) - tokens
            if not named:
                raise
            tokens |= named
