"""The steps of a chat request that need the renderer: rendering the prompt, and parsing the completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from verbatim.core.errors import RecordError, UsageError, VerbatimError
from verbatim.core.sampling import SamplingParams
from verbatim.core.texts import error_text
from verbatim.core.types import Int32
from verbatim.inference.chat.chat_protocol import ChatProtocol
from verbatim.inference.chat.messages import text_of_all
from verbatim.inference.chat.partial import partial_texts
from verbatim.inference.chat.protocol import ChatReply, ChatRequest
from verbatim.inference.chat.reply import read_reply
from verbatim.inference.http.completions import check_completion
from verbatim.inference.http.limits import BYTES_OF_A_TOKEN, most_text
from verbatim.inference.http.request_body import check_model, read_json
from verbatim.inference.sampler import Completion
from verbatim.models.renderers.renderer import Renderer
from verbatim.models.renderers.stop_ids import ends_within


@dataclass(frozen=True, kw_only=True, eq=False)
class RenderedRequest:
    """A chat request whose conversation has been rendered."""

    request: ChatRequest
    """The request without its messages. The messages are already in the prompt, and would have to be pickled with this
    record to reach another process."""
    prompt_ids: Int32
    """The prompt: int32 [P]."""
    params: SamplingParams


def read_chat(
    data: bytes,
    headers: Mapping[str, str],
    protocol: ChatProtocol,
    *,
    renderer: Renderer,
    model: str,
    room: int,
    vocab_size: int,
    is_count: bool = False,
) -> RenderedRequest:
    """Read and render the body of a request. Checks as much as possible first, because rendering is expensive.

    Args:
        data: The body.
        headers: The request's headers, by lower-case name.
        protocol: The protocol of the body.
        renderer: The model's renderer.
        model: The model's name in requests.
        room: Context length in tokens. If the request has no limit, a completion may fill the context that the prompt
            leaves.
        vocab_size: Size of the model's vocabulary. The renderer may have stop ids that the model cannot sample.
        is_count: True if the request only asks for the number of prompt tokens.

    Raises:
        Refused: a field is invalid or cannot be honoured, or the request names another model.
        UsageError: the body is not a JSON object, or the messages are too long or cannot be rendered.
        RecordError: the messages are longer than the context.
        EnvironmentFault: the model's chat template refuses the messages.
    """
    body = read_json(data)
    request = protocol.read(body, headers)
    check_model(request.model, model)
    for name, part in (("messages", request.messages), ("tools", request.tools)):
        size = text_of_all(part)
        if size > most_text(room):
            raise UsageError(
                f"{name}: {size} characters; a context of {room} tokens holds at most {most_text(room)} "
                f"characters, {BYTES_OF_A_TOKEN} per token"
            )
    ids = _render(renderer, request)
    if len(ids) >= room and not is_count:
        raise RecordError(
            f"messages: {len(ids)} ids leave no room in a context of {room} tokens; at most {room - 1} fit"
        )
    ends = ends_within(renderer.stop_token_ids, vocab_size)
    params = request.sampling.params(SamplingParams(), room=max(1, room - len(ids)), end_ids=ends)
    return RenderedRequest(request=replace(request, messages=()), prompt_ids=ids, params=params)


def _render(renderer: Renderer, request: ChatRequest) -> Int32:
    try:
        return renderer.render_ids(list(request.messages), list(request.tools) or None, add_generation_prompt=True)
    except VerbatimError:
        raise
    except Exception as error:  # templates and tokenizers may raise any exception
        about = "messages or tools" if request.tools else "messages"
        raise UsageError(f"{about}: rendering failed ({error_text(error, 200)})") from error


def read_partial(asked: RenderedRequest, ids: Int32, *, renderer: Renderer) -> tuple[str, str]:
    """The (reasoning, content) that the reply is certain to begin with, given the ids sampled so far."""
    return partial_texts(ids, asked.request, renderer, asked.prompt_ids)


def read_completion(
    asked: RenderedRequest, completion: Completion, seed: int, call_prefix: str, *, renderer: Renderer
) -> ChatReply:
    """Parse a completion into a reply.

    Raises:
        SamplerFault: the engine's logprobs or versions do not match the ids.
    """
    check_completion(completion)
    return read_reply(
        completion, asked.request, renderer, asked.prompt_ids, seed=seed, call_id=lambda k: f"{call_prefix}_{k}"
    )
