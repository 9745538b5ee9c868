"""A server with scripted answers, behind real sockets."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1.health import HealthServicer

from deltaflash.v1 import (
    control_pb2,
    control_pb2_grpc,
    documents_pb2,
    documents_pb2_grpc,
    generation_pb2,
    inference_pb2,
    inference_pb2_grpc,
)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]

Events = Iterator[inference_pb2.GenerateResponse]
Answer = Callable[[inference_pb2.GenerateRequest, grpc.ServicerContext], Events]


def started(**fields: object) -> inference_pb2.GenerateResponse:
    values = {"request_id": "r1", "model": "nano", "prompt_tokens": 3, "max_tokens": 64} | fields
    return inference_pb2.GenerateResponse(started=generation_pb2.Started(**values))


def delta(text: str, *tokens: generation_pb2.TokenRecord) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(delta=generation_pb2.Delta(text=text, tokens=tokens))


def finished() -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        finished=generation_pb2.Finished(
            finish_reason=generation_pb2.FINISH_REASON_STOP,
            stop_match=generation_pb2.StopMatch(stop_string="END"),
            usage=generation_pb2.Usage(prompt_tokens=3, completion_tokens=4, total_tokens=7),
            stats=generation_pb2.RequestStats(
                steps=2,
                drafted_tokens=6,
                accepted_tokens=2,
                drafted_per_position=[2, 2, 2],
                accepted_per_position=[1, 1, 0],
                total_us=1500,
            ),
        )
    )


def fail(
    context: grpc.ServicerContext,
    code: grpc.StatusCode,
    reason: str | None = None,
    retry_delay_s: float | None = None,
    violations: dict[str, str] | None = None,
) -> None:
    """Ends the call with a status and its google.rpc details."""
    number, name = code.value
    assert code_pb2.Code.Name(number) == code.name
    status = status_pb2.Status(code=number, message=f"scripted {name}")
    details = []
    if reason is not None:
        info = error_details_pb2.ErrorInfo(reason=reason, domain="deltaflash")
        info.metadata["max_queued"] = "4"
        details.append(info)
    if violations is not None:
        bad = error_details_pb2.BadRequest()
        for path, description in violations.items():
            bad.field_violations.add(field=path, description=description)
        details.append(bad)
    if retry_delay_s is not None:
        delay = duration_pb2.Duration(
            seconds=int(retry_delay_s), nanos=round(retry_delay_s % 1 * 1e9)
        )
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    context.set_trailing_metadata([("grpc-status-details-bin", status.SerializeToString())])
    context.abort(code, status.message)


@dataclass
class Script(
    inference_pb2_grpc.InferenceServiceServicer,
    documents_pb2_grpc.DocumentsServiceServicer,
    control_pb2_grpc.ControlServiceServicer,
):
    """Answers the n-th Generate call with `answers[n]`, and from then on with the last.

    `document_events`, when there are any, replace the answer of ParseDocument.
    """

    answers: list[Answer] = field(default_factory=list)
    document_events: list[documents_pb2.ParseDocumentResponse] = field(default_factory=list)
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    ended_as_cancelled: bool = False
    read_through: bool = False
    running: int = 0
    target: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    health: HealthServicer = field(default_factory=HealthServicer)

    def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Events:
        self.arrivals_s.append(time.monotonic())
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        context.add_callback(self._note_end)
        with self._lock:
            self.running += 1
        yield from self.answers[min(len(self.requests), len(self.answers)) - 1](request, context)
        # An answer that returns because its caller is gone was not read through.
        self.read_through = context.is_active()

    def _note_end(self) -> None:
        with self._lock:
            self.running -= 1
        self.ended_as_cancelled = not self.read_through
        self.ended.set()

    def ParsePage(  # noqa: N802
        self, request: documents_pb2.ParsePageRequest, context: grpc.ServicerContext
    ) -> Iterator[documents_pb2.ParsePageResponse]:
        del context
        size = len(request.image.data)
        yield documents_pb2.ParsePageResponse(started=started().started)
        yield documents_pb2.ParsePageResponse(
            page_info=documents_pb2.PageInfo(source_width=size, model_width=32)
        )
        yield documents_pb2.ParsePageResponse(delta=delta("# Title").delta)
        yield documents_pb2.ParsePageResponse(finished=finished().finished)

    def ParseDocument(  # noqa: N802
        self, request: documents_pb2.ParseDocumentRequest, context: grpc.ServicerContext
    ) -> Iterator[documents_pb2.ParseDocumentResponse]:
        del context
        response = documents_pb2.ParseDocumentResponse
        if self.document_events:
            yield from self.document_events
            return
        num_pages = len(request.pages.images)
        yield response(
            document_started=documents_pb2.DocumentStarted(request_id="d", num_pages=num_pages)
        )
        for index in reversed(range(num_pages)):
            yield response(page_index=index, started=started().started)
        for index in range(num_pages):
            yield response(page_index=index, delta=delta(f"page {index}").delta)
            yield response(page_index=index, finished=finished().finished)
        yield response(
            document_finished=documents_pb2.DocumentFinished(
                num_pages=num_pages, usage=generation_pb2.Usage(total_tokens=7 * num_pages)
            )
        )

    def GetServerInfo(  # noqa: N802
        self, request: control_pb2.GetServerInfoRequest, context: grpc.ServicerContext
    ) -> control_pb2.GetServerInfoResponse:
        del request, context
        server = control_pb2.ServerInfo(version="1.2", schema_revision=1, default_max_tokens=128)
        server.limits.max_tokens = 4096
        server.capabilities.extend([control_pb2.CAPABILITY_CHAT, 999])
        return control_pb2.GetServerInfoResponse(server=server)

    def GetModelInfo(  # noqa: N802
        self, request: control_pb2.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> control_pb2.GetModelInfoResponse:
        if request.HasField("model"):
            fail(context, grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL")
        model = control_pb2.ModelInfo(name="nano", end_token_ids=[1, 2], has_drafter=True)
        return control_pb2.GetModelInfoResponse(model=model)

    def GetLoad(  # noqa: N802
        self, request: control_pb2.GetLoadRequest, context: grpc.ServicerContext
    ) -> control_pb2.GetLoadResponse:
        del request, context
        return control_pb2.GetLoadResponse(load=control_pb2.LoadInfo(running=2, slots_total=8))

    def Cancel(  # noqa: N802
        self, request: control_pb2.CancelRequest, context: grpc.ServicerContext
    ) -> control_pb2.CancelResponse:
        if request.request_id != "live":
            fail(context, grpc.StatusCode.NOT_FOUND, "UNKNOWN_REQUEST")
        return control_pb2.CancelResponse(status=control_pb2.CANCEL_STATUS_CANCELLING)

    def Drain(  # noqa: N802
        self, request: control_pb2.DrainRequest, context: grpc.ServicerContext
    ) -> control_pb2.DrainResponse:
        del context
        return control_pb2.DrainResponse(running=request.wait_ms, queued=1)

    def SwapEngine(  # noqa: N802
        self, request: control_pb2.SwapEngineRequest, context: grpc.ServicerContext
    ) -> control_pb2.SwapEngineResponse:
        del context
        return control_pb2.SwapEngineResponse(model=control_pb2.ModelInfo(name=request.engine))
