"""What /openapi.json promises holds for whatever is thrown at it: no failure, no reply it does not name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.served import serve

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[schemathesis.BaseSchema]:
    with serve(Path(tmp_path_factory.mktemp("results")), idle=False) as served:
        yield schemathesis.openapi.from_url(f"{served.url}/openapi.json")


def test_every_operation_keeps_its_promise(api: schemathesis.BaseSchema) -> None:
    operations = [result.ok() for result in api.get_all_operations()]
    assert len(operations) >= 24
    for operation in operations:

        @settings(max_examples=10, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def keeps_its_promise(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS, timeout=10)

        keeps_its_promise()
