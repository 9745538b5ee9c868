"""DocumentsService: refused by name until an engine reads pictures."""

from deltaflash.v1 import documents_pb2, documents_pb2_grpc
from server.errors import FeatureUnimplementedError
from server.service_context import ServiceContext
from server.services.call import CallContext, call


class DocumentsServicer(documents_pb2_grpc.DocumentsServiceServicer):
    """Serves `deltaflash.v1.DocumentsService`."""

    def __init__(self, context: ServiceContext) -> None:
        """Takes what the services share."""
        self.context = context

    @call
    async def ParsePage(  # type: ignore[override]  # noqa: N802
        self, request: documents_pb2.ParsePageRequest, context: CallContext
    ) -> None:
        """Refuses the call: no engine of this server has a vision encoder."""
        del request, context
        raise FeatureUnimplementedError("DocumentsService.ParsePage")

    @call
    async def ParseDocument(  # type: ignore[override]  # noqa: N802
        self, request: documents_pb2.ParseDocumentRequest, context: CallContext
    ) -> None:
        """Refuses the call: no engine of this server has a vision encoder."""
        del request, context
        raise FeatureUnimplementedError("DocumentsService.ParseDocument")
