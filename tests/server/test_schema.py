"""What /openapi.json promises holds for whatever is thrown at it: no failure, no reply it does not name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.served import PICTURES, serve
from unfuse.core.checking import check_request
from unfuse.core.errors import InvalidParameter
from unfuse.core.modalities import IMAGE, VIDEO, Modality
from unfuse.core.parameters import Parameter
from unfuse.server.openapi_schemas import schema_of

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(Path(tmp_path_factory.mktemp("results")), idle=False) as served:
        yield served.url


@pytest.fixture(scope="module")
def api(address: str) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{address}/openapi.json")


@pytest.fixture(scope="module")
def document(address: str) -> dict[str, Any]:
    with httpx2.Client(base_url=address, trust_env=False) as http:
        return dict(http.get("/openapi.json").json())


def test_every_operation_conforms_to_its_openapi_schema(api: schemathesis.BaseSchema) -> None:
    operations = [result.ok() for result in api.get_all_operations()]
    assert len(operations) >= 24
    for operation in operations:

        @settings(max_examples=10, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def keeps_its_promise(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS, timeout=10)

        keeps_its_promise()


def test_parameter_of_a_modality_gets_a_schema_and_bounds_checks() -> None:
    line = Parameter("sharpness", "integer", 1, 9, description="how sharp")
    medium = replace(IMAGE, parameters=(*IMAGE.parameters, line))

    assert schema_of(line) == {"type": "integer", "minimum": 1, "maximum": 9, "description": "how sharp"}
    assert check_request(PICTURES, {"prompt": "a", "sharpness": "9"}, medium)[0]["sharpness"] == 9
    with pytest.raises(InvalidParameter, match="sharpness must be 1 to 9, not 10"):
        check_request(PICTURES, {"prompt": "a", "sharpness": 10}, medium)
    with pytest.raises(InvalidParameter, match="did you mean sharpness"):
        check_request(PICTURES, {"prompt": "a", "sharpnes": 1}, medium)


@pytest.mark.parametrize(("path", "medium"), [("/v1/images/generations", IMAGE), ("/v1/videos", VIDEO)])
def test_every_parameter_is_in_the_openapi_schema(document: dict[str, Any], path: str, medium: Modality) -> None:
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    documented = {one.name for one in medium.parameters if one.use != "refused"}
    assert documented <= body["properties"].keys()


def test_every_request_body_has_a_valid_example(document: dict[str, Any], address: str) -> None:
    """The page at /docs sends it as it is."""
    bodies = {
        path: operations["post"]["requestBody"]["content"]["application/json"]
        for path, operations in document["paths"].items()
        if "requestBody" in operations.get("post", {})
    }
    assert {"/v1/images/generations", "/v1/images/edits", "/v1/videos", "/v1/chat/completions"} < bodies.keys()
    for body in bodies.values():
        jsonschema_rs.validate(body["schema"], body["example"])

    with httpx2.Client(base_url=address, timeout=60, trust_env=False) as http:
        for path in ("/v1/images/generations", "/v1/videos", "/v1/videos/generations"):
            assert http.post(path, json=bodies[path]["example"]).status_code == 200, path


def test_image_stream_conforms_to_its_openapi_schema(api: schemathesis.BaseSchema) -> None:
    (operation,) = (found.ok() for found in api.get_all_operations() if found.ok().path == "/v1/images/generations")
    case = operation.Case(body={"prompt": "a ring", "stream": True, "partial_images": 1}, media_type="application/json")
    reply = case.call_and_validate(checks=CHECKS, timeout=10)
    assert (reply.status_code, reply.headers["content-type"]) == (200, ["text/event-stream; charset=utf-8"])


def test_every_json_response_has_a_schema(document: dict[str, Any]) -> None:
    bare = [
        f"{method} {path} {status}"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        for status, reply in operation["responses"].items()
        for kind, content in reply.get("content", {}).items()
        if kind == "application/json"
        and not content.get("schema", {}).keys() & {"properties", "additionalProperties"}
        and "$ref" not in content.get("schema", {})
    ]
    assert bare == []
    assert document["components"]["schemas"]["Event"]["properties"].keys() >= {"type", "stage", "step", "seq"}


def test_openapi_schema_is_built_on_demand(tmp_path: Path) -> None:
    with serve(tmp_path) as served, httpx2.Client(base_url=served.url, trust_env=False) as http:
        app = served.server.config.app
        assert http.get("/health").status_code == 200 and app.openapi_schema is None
        assert http.get("/openapi.json").json() == app.openapi_schema


def test_docs_page_loads_no_external_resources(address: str) -> None:
    with httpx2.Client(base_url=address, trust_env=False) as http:
        page = http.get("/docs")
        fetched = re.findall(r'(?:src|href)="([^"]*)"', page.text)

        assert page.status_code == 200
        assert fetched
        assert "//" not in "".join(fetched)
        assert [http.get(path).status_code for path in fetched] == [200] * len(fetched)
