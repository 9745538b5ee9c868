"""InferenceService: one checked request to one stream of events."""

import time
from dataclasses import replace
from functools import partial

from deltaflash.v1 import inference_pb2, inference_pb2_grpc
from server.backend import EngineInfo, GenerationRequest
from server.config import ServerConfig
from server.service_context import ServiceContext
from server.services.answer import Answer, CallScope, check_options
from server.services.call import CallContext, call
from server.services.pictures import (
    check_chat_pictures,
    check_room,
    decoded_bytes,
    default_size,
    prepare_all,
)
from server.services.writer import CallLine, EventWriter
from server.validation import (
    Findings,
    check_extras,
    check_message_size,
    check_model,
    check_prompt,
    check_request_id,
)


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves `deltaflash.v1.InferenceService`."""

    def __init__(self, context: ServiceContext) -> None:
        """Takes what the services share."""
        self.context = context

    # A coroutine that writes, where the stub declares an iterator: a write can be timed.
    @call
    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: CallContext
    ) -> None:
        """Generates one answer."""
        arrived_ns = time.monotonic_ns()
        self.context.lifecycle.require_serving()
        engine, config = self.context.require_engine(), self.context.config
        info = engine.backend.info
        check_message_size(request.ByteSize(), config)
        request_id = check_request_id(request)
        check_model(request.model if request.HasField("model") else None, info)
        draft = check_generate(request, info, config, self.context.reads_pictures)
        pictures = check_chat_pictures(request.chat, config)
        held = 0
        if pictures:
            decoded = (decoded_bytes(default_size(info), picture.header) for picture in pictures)
            held = request.ByteSize() + sum(decoded)
        scope = CallScope(self.context, engine, CallLine(context, config.write_timeout_s))
        with (
            self.context.live.admit(request_id, info.max_batch_size, info.max_queued, held) as live,
            EventWriter(scope.line, inference_pb2.GenerateResponse) as writer,
        ):
            answer = Answer(scope, live, writer, arrived_ns)
            prompt_ids = await engine.prompts.encode(request, info)
            if not pictures:
                await answer.run(draft, prompt_ids)
                return
            pool, size = self.context.require_pool("chat"), default_size(info)
            check_room(pictures, size, prompt_ids, info)
            images = await answer.prepare(partial(prepare_all, pictures, pool, size))
            await answer.run(replace(draft, report_progress=True), prompt_ids, images)


def check_generate(
    request: inference_pb2.GenerateRequest,
    info: EngineInfo,
    config: ServerConfig,
    reads_pictures: bool,
) -> GenerationRequest:
    """Checks every field of a request but its name, its model and its pictures.

    Returns:
        The request as `check_options` returns it.

    Raises:
        InvalidFieldError: Fields are out of their range.
        FeatureUnimplementedError: A field asks for what this engine cannot do.
        EmptyPromptError: There is no prompt.
        PromptTooLongError: There are too many token ids.
    """
    findings = Findings()
    check_prompt(request, info, findings, reads_pictures)
    draft = check_options(request, info, config, findings, "")
    check_extras(request, findings)
    findings.raise_any()
    return draft
