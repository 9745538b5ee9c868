"""The scripted server, one for each test."""

from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sdk.scripted_server import OPTIONS, Script

from deltaflash.v1 import control_pb2_grpc, documents_pb2_grpc, inference_pb2_grpc


@pytest.fixture
def script() -> Iterator[Script]:
    servicer = Script()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8), options=OPTIONS)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    documents_pb2_grpc.add_DocumentsServiceServicer_to_server(servicer, server)
    control_pb2_grpc.add_ControlServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer.health, server)
    servicer.health.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    servicer.target = f"127.0.0.1:{port}"
    server.start()
    yield servicer
    server.stop(grace=None).wait()
