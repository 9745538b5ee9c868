"""Requests as messages of the wire. Numbers that their field cannot hold raise ValueError."""

from collections.abc import Sequence

from deltaflash.v1 import documents_pb2, generation_pb2, inference_pb2
from deltaflash_client.options import (
    CallOptions,
    DocumentOptions,
    GenerateOptions,
    Grammar,
    OutputOptions,
    PageOptions,
    Pdf,
    RepetitionGuard,
    SamplingOptions,
    SpeculationOptions,
    StoppingOptions,
)
from deltaflash_client.prompt import Chat, ChatMessage, ChatRole, Image, Prompt, TokenIds

_CHAT_ROLES = {
    ChatRole.SYSTEM: inference_pb2.CHAT_ROLE_SYSTEM,
    ChatRole.USER: inference_pb2.CHAT_ROLE_USER,
    ChatRole.ASSISTANT: inference_pb2.CHAT_ROLE_ASSISTANT,
}


def _image(image: Image) -> generation_pb2.Image:
    return generation_pb2.Image(data=image.data, mime_type=image.mime_type)


def _sampling(options: SamplingOptions | None) -> generation_pb2.SamplingOptions | None:
    if options is None:
        return None
    return generation_pb2.SamplingOptions(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=options.logit_bias,
        seed=options.seed,
    )


def _repetition_guard(guard: RepetitionGuard | None) -> generation_pb2.RepetitionGuard | None:
    if guard is None:
        return None
    return generation_pb2.RepetitionGuard(
        enabled=guard.enabled,
        max_period=guard.max_period,
        min_repeats=guard.min_repeats,
        min_repeated_tokens=guard.min_repeated_tokens,
    )


def _stopping(options: StoppingOptions | None) -> generation_pb2.StoppingOptions | None:
    if options is None:
        return None
    return generation_pb2.StoppingOptions(
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        stop_strings=options.stop_strings,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        include_stop_in_output=options.include_stop_in_output,
        repetition_guard=_repetition_guard(options.repetition_guard),
    )


def _output(options: OutputOptions | None) -> generation_pb2.OutputOptions | None:
    if options is None:
        return None
    return generation_pb2.OutputOptions(
        skip_special_tokens=options.skip_special_tokens,
        token_records=options.token_records,
        top_logprobs=options.top_logprobs,
    )


def _speculation(options: SpeculationOptions | None) -> generation_pb2.SpeculationOptions | None:
    if options is None:
        return None
    return generation_pb2.SpeculationOptions(
        enabled=options.enabled, max_draft_tokens=options.max_draft_tokens
    )


def _grammar(grammar: Grammar | None) -> generation_pb2.Grammar | None:
    if grammar is None:
        return None
    if grammar.json_schema is not None:
        return generation_pb2.Grammar(json_schema=grammar.json_schema)
    if grammar.regex is not None:
        return generation_pb2.Grammar(regex=grammar.regex)
    return generation_pb2.Grammar(ebnf=grammar.ebnf or "")


def _chat_message(message: ChatMessage) -> inference_pb2.ChatMessage:
    content = [message.content] if isinstance(message.content, str) else message.content
    parts = [
        inference_pb2.ContentPart(text=part)
        if isinstance(part, str)
        else inference_pb2.ContentPart(image=_image(part))
        for part in content
    ]
    return inference_pb2.ChatMessage(role=_CHAT_ROLES[ChatRole(message.role)], content=parts)


def generate_request(prompt: Prompt, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """Returns the message for `generate`.

    Args:
        prompt: What the answer continues.
        options: Keyword arguments of the call; timeout_s is not part of the message.

    Raises:
        TypeError: The prompt is of no known kind.
        ValueError: A number does not fit its field.
    """
    request = inference_pb2.GenerateRequest(
        request_id=options.get("request_id"),
        model=options.get("model"),
        sampling=_sampling(options.get("sampling")),
        stopping=_stopping(options.get("stopping")),
        output=_output(options.get("output")),
        speculation=_speculation(options.get("speculation")),
        num_sequences=options.get("num_sequences"),
        grammar=_grammar(options.get("grammar")),
        lora_adapter=options.get("lora_adapter"),
        priority=options.get("priority"),
    )
    match prompt:
        case str():
            request.text = prompt
        case TokenIds():
            # SetInParent: an empty list is a prompt too, and the server's to refuse.
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(prompt.ids)
        case Chat():
            request.chat.CopyFrom(
                inference_pb2.Chat(
                    messages=[_chat_message(m) for m in prompt.messages],
                    add_generation_prompt=prompt.add_generation_prompt,
                    enable_thinking=prompt.enable_thinking,
                )
            )
        case _:
            raise TypeError(f"prompt: expected str, TokenIds or Chat, got {type(prompt).__name__}")
    return request


def _page_options(options: PageOptions | None) -> documents_pb2.PageOptions | None:
    if options is None:
        return None
    return documents_pb2.PageOptions(
        instruction=options.instruction,
        min_pixels=options.min_pixels,
        max_pixels=options.max_pixels,
        sampling=_sampling(options.sampling),
        stopping=_stopping(options.stopping),
        output=_output(options.output),
        speculation=_speculation(options.speculation),
    )


def parse_page_request(
    image: Image, page: PageOptions | None, options: CallOptions
) -> documents_pb2.ParsePageRequest:
    """Returns the message for `parse_page`.

    Args:
        image: The picture of the page.
        page: How it is read.
        options: Keyword arguments of the call.

    Raises:
        ValueError: A number does not fit its field.
    """
    return documents_pb2.ParsePageRequest(
        request_id=options.get("request_id"),
        model=options.get("model"),
        image=_image(image),
        options=_page_options(page),
        priority=options.get("priority"),
    )


def parse_document_request(
    document: Pdf | Sequence[Image], options: DocumentOptions
) -> documents_pb2.ParseDocumentRequest:
    """Returns the message for `parse_document`.

    Args:
        document: A PDF file, or pictures of the pages.
        options: Keyword arguments of the call.

    Raises:
        ValueError: A number does not fit its field.
    """
    request = documents_pb2.ParseDocumentRequest(
        request_id=options.get("request_id"),
        model=options.get("model"),
        options=_page_options(options.get("options")),
        priority=options.get("priority"),
        max_parallel_pages=options.get("max_parallel_pages"),
    )
    if isinstance(document, Pdf):
        pdf = documents_pb2.Pdf(
            data=document.data,
            first_page=document.first_page,
            num_pages=document.num_pages,
            dpi=document.dpi,
        )
        request.pdf.CopyFrom(pdf)
    else:
        request.pages.SetInParent()
        request.pages.images.extend(_image(image) for image in document)
    return request
