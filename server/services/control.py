"""ControlService: what the server is, how busy it is, and its two switches."""

import server
from deltaflash.v1 import control_pb2, control_pb2_grpc
from server.backend import EngineInfo
from server.config import ServerConfig
from server.errors import FeatureUnimplementedError
from server.lifecycle import Phase
from server.service_context import Engine, ServiceContext
from server.services.call import MINIMUM_CLIENT_REVISION, SCHEMA_REVISION, CallContext, call
from server.services.documents import max_parallel_pages
from server.validation import Findings, check_model

MAX_DRAIN_WAIT_MS = 3_600_000


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Serves `deltaflash.v1.ControlService`."""

    def __init__(self, context: ServiceContext) -> None:
        """Takes what the services share."""
        self.context = context

    @call
    async def GetServerInfo(  # noqa: N802
        self, request: control_pb2.GetServerInfoRequest, context: CallContext
    ) -> control_pb2.GetServerInfoResponse:
        """Returns version, limits and capabilities."""
        del request, context
        engine = self.context.require_engine()
        info, reads_pictures = engine.backend.info, self.context.reads_pictures
        return control_pb2.GetServerInfoResponse(
            server=control_pb2.ServerInfo(
                version=server.VERSION,
                schema_revision=SCHEMA_REVISION,
                minimum_client_revision=MINIMUM_CLIENT_REVISION,
                limits=limits_message(info, self.context.config, reads_pictures),
                capabilities=capabilities(engine, reads_pictures),
                default_max_tokens=info.default_max_tokens,
            )
        )

    @call
    async def GetModelInfo(  # noqa: N802
        self, request: control_pb2.GetModelInfoRequest, context: CallContext
    ) -> control_pb2.GetModelInfoResponse:
        """Returns the engine that is loaded."""
        del context
        info = self.context.require_engine().backend.info
        check_model(request.model if request.HasField("model") else None, info)
        return control_pb2.GetModelInfoResponse(model=model_message(info))

    @call
    async def GetLoad(  # noqa: N802
        self, request: control_pb2.GetLoadRequest, context: CallContext
    ) -> control_pb2.GetLoadResponse:
        """Returns how busy the engine is."""
        del request, context
        load = self.context.require_engine().backend.load()
        return control_pb2.GetLoadResponse(
            load=control_pb2.LoadInfo(
                running=load.num_running,
                queued=load.num_queued,
                slots_used=load.slots_used,
                slots_total=load.slots_total,
                kv_pages_used=load.pages_used,
                kv_pages_total=load.pages_total,
                running_tokens=load.num_running_tokens,
                queued_tokens=load.num_queued_tokens,
                engine_silence_ms=load.silence_ns // 1_000_000,
                queue_age_ms=load.oldest_queued_ns // 1_000_000,
                draining=self.context.lifecycle.phase is Phase.DRAINING,
            )
        )

    @call
    async def Cancel(  # noqa: N802
        self, request: control_pb2.CancelRequest, context: CallContext
    ) -> control_pb2.CancelResponse:
        """Ends a request by its id."""
        del context
        findings = Findings()
        findings.check_name("request_id", request.request_id)
        findings.raise_any()
        was_live = self.context.live.cancel(request.request_id)
        status = control_pb2.CancelStatus
        return control_pb2.CancelResponse(
            status=status.CANCEL_STATUS_CANCELLING
            if was_live
            else status.CANCEL_STATUS_ALREADY_FINISHED
        )

    @call
    async def Drain(  # noqa: N802
        self, request: control_pb2.DrainRequest, context: CallContext
    ) -> control_pb2.DrainResponse:
        """Stops admission for good and waits for what runs, if asked to."""
        del context
        findings = Findings()
        findings.check_range("wait_ms", request.wait_ms, 0, MAX_DRAIN_WAIT_MS)
        findings.raise_any()
        await self.context.lifecycle.advance(Phase.DRAINING)
        if request.wait_ms:
            await self.context.live.wait_idle(request.wait_ms / 1000)
        num_live = self.context.live.num_places
        engine = self.context.engine
        running = min(num_live, 0 if engine is None else engine.backend.load().num_running)
        return control_pb2.DrainResponse(running=running, queued=num_live - running)

    @call
    async def SwapEngine(  # noqa: N802
        self, request: control_pb2.SwapEngineRequest, context: CallContext
    ) -> control_pb2.SwapEngineResponse:
        """Refuses the call: one process serves one engine directory."""
        del request, context
        raise FeatureUnimplementedError("ControlService.SwapEngine")


def limits_message(
    info: EngineInfo, config: ServerConfig, reads_pictures: bool
) -> control_pb2.Limits:
    """Returns what a request may ask for; what the engine cannot do at all has the limit 0."""
    images = config.images
    limits = control_pb2.Limits(
        max_prompt_tokens=info.context_len - 1,
        max_tokens=info.context_len - 1,
        max_message_bytes=config.max_message_bytes,
        max_stop_strings=config.max_stop_strings,
        max_stop_string_bytes=config.max_stop_string_bytes,
        max_stop_token_ids=info.max_stop_token_ids,
        max_logit_biases=info.max_logit_biases,
        max_top_logprobs=info.max_top_logprobs,
        max_queued=info.max_queued,
        max_request_ms=config.max_request_ms,
        min_keepalive_ms=config.min_keepalive_ms,
    )
    if reads_pictures:
        limits.max_image_bytes = min(images.max_bytes, config.max_message_bytes)
        limits.max_image_pixels = images.max_pixels
        limits.max_images = config.max_images
        limits.max_document_pages = images.max_pages
        limits.max_image_side_ratio = int(images.max_side_ratio)
        limits.max_parallel_pages = max_parallel_pages(info, config)
    return limits


def capabilities(engine: Engine, reads_pictures: bool) -> list[control_pb2.Capability.ValueType]:
    """Returns what the server can do with its engine, ascending."""
    info = engine.backend.info
    names = control_pb2.Capability
    has = {
        names.CAPABILITY_TEXT_PROMPT: engine.prompts.tokenizer is not None,
        names.CAPABILITY_TOKEN_PROMPT: True,
        names.CAPABILITY_CHAT: engine.prompts.template is not None,
        names.CAPABILITY_IMAGE_INPUT: reads_pictures,
        names.CAPABILITY_PARSE_PAGE: reads_pictures,
        names.CAPABILITY_PARSE_DOCUMENT: reads_pictures,
        names.CAPABILITY_TOKEN_RECORDS: info.has_token_records,
        names.CAPABILITY_LOGPROBS: info.max_top_logprobs > 0,
        names.CAPABILITY_SPECULATION: info.max_draft_tokens > 0,
    }
    return sorted(name for name, present in has.items() if present)


def model_message(info: EngineInfo) -> control_pb2.ModelInfo:
    """Returns the loaded engine as ModelInfo."""
    return control_pb2.ModelInfo(
        name=info.name,
        engine_id=info.engine_id,
        architecture=info.architecture,
        context_length=info.context_len,
        vocab_size=info.vocab_size,
        end_token_ids=info.end_token_ids,
        precision=info.precision,
        has_drafter=info.max_draft_tokens > 0,
        max_draft_tokens=info.max_draft_tokens,
        has_vision=info.has_vision,
        max_image_pixels=info.max_image_pixels,
        backend=info.backend,
    )
