"""Tests reflection and health of both services, as standard tools use them."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from conftest import EmbeddedServices
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

STANDARD = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
# Service -> its methods as (request, response, whether the request is a stream, whether the response is a stream).
METHODS = {
    "dynatree.v1.DraftService": {
        "Generate": ("GenerateRequest", "GenerateResponse", False, True),
        "GetModelInfo": ("DraftServiceGetModelInfoRequest", "DraftServiceGetModelInfoResponse", False, False),
        "GetVocabulary": ("GetVocabularyRequest", "GetVocabularyResponse", False, True),
        "Tokenize": ("TokenizeRequest", "TokenizeResponse", False, False),
        "Detokenize": ("DetokenizeRequest", "DetokenizeResponse", False, False),
    },
    "dynatree.v1.VerifyService": {
        "Verify": ("VerifyRequest", "VerifyResponse", True, True),
        "GetModelInfo": ("VerifyServiceGetModelInfoRequest", "VerifyServiceGetModelInfoResponse", False, False),
        "GetTokenizer": ("GetTokenizerRequest", "GetTokenizerResponse", False, True),
    },
}


@pytest.fixture(params=METHODS)
def service(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def channel(service: str, embedded_services: EmbeddedServices) -> Iterator[grpc.Channel]:
    addresses = {
        "dynatree.v1.DraftService": embedded_services.draft_address,
        "dynatree.v1.VerifyService": embedded_services.verify_address,
    }
    with grpc.insecure_channel(addresses[service]) as opened:
        yield opened


def test_reflection_lists_the_services(service: str, channel: grpc.Channel) -> None:
    assert set(ProtoReflectionDescriptorDatabase(channel).get_services()) == {service, *STANDARD}


def test_reflection_describes_every_method(service: str, channel: grpc.Channel) -> None:
    described = DescriptorPool(ProtoReflectionDescriptorDatabase(channel)).FindServiceByName(service)
    assert {
        method.name: (
            method.input_type.name,
            method.output_type.name,
            method.client_streaming,
            method.server_streaming,
        )
        for method in described.methods
    } == METHODS[service]


def test_health_is_serving_for_the_server_and_the_service(service: str, channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ("", service):
        response = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
        assert response.status == health_pb2.HealthCheckResponse.SERVING, name


def test_health_of_another_service_is_not_found(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="no.such.Service"), timeout=10)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
