"""The API server, asked by HTTP for the few things that an operator needs of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import httpx2

from unfuse.core.errors import TransientError
from unfuse.k8s.spec import InvalidSpec, Object

if TYPE_CHECKING:
    from kopf import ConnectionInfo

APPLIED = "fieldManager=unfuse-operator&force=true"
APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"


class ClusterClient:
    """The server, with the credentials that `login` finds; it looks for them again when they are refused."""

    def __init__(self, login: Callable[[], ConnectionInfo]) -> None:
        self._login = login
        self._client: httpx2.AsyncClient | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._client:
            await self._client.aclose()
        self._client = None

    async def ask(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Object | None:
        """What the server answers; None where nothing is.

        Raises Wrong for what it refuses, TransientError if it cannot be reached or is not well. An error of its own
        about what is written may come of that, as where an admission webhook does not answer: that is refused.
        """
        if self._client is None:
            found = self._login()
            self._client = httpx2.AsyncClient(
                base_url=found.server, headers=found.as_http_headers(), verify=found.as_ssl_context(), trust_env=False
            )
        content = None if body is None else json.dumps(body)
        try:
            answer = await self._client.request(method, path, content=content, headers={"content-type": kind})
            said = {} if answer.status_code == 404 else answer.json()  # of an API that is not there it is text
        except (httpx2.HTTPError, ValueError) as error:
            raise TransientError(f"the API server does not answer: {error!r}") from error
        if answer.status_code == 401:
            await self.close()
        if answer.status_code in {401, 429} or answer.status_code >= (500 if method == "GET" else 501):
            raise TransientError(f"the API server says {answer.status_code}: {said.get('message')}")
        if answer.is_error and answer.status_code != 404:
            raise InvalidSpec(said.get("reason") or "Refused", str(said.get("message")))
        return None if answer.status_code == 404 else dict(said)

    async def every(self, api: str, kind: str, namespace: str, query: str = "") -> dict[str, Object]:
        """All of a kind in a namespace, by name."""
        found = await self.ask("GET", place(api, kind, namespace) + query) or {}
        return {one["metadata"]["name"]: one for one in found.get("items", [])}

    async def create(self, made: Object, namespace: str, owner: Object) -> None:
        """Make an object; where there is one of that name nothing is changed. Raises as `ask` does."""
        whole = made | {"metadata": made["metadata"] | {"ownerReferences": [owner]}}
        try:
            await self.ask("POST", place(made["apiVersion"], made["kind"], namespace), whole)
        except InvalidSpec as error:
            if error.reason != "AlreadyExists":
                raise

    async def apply(self, made: Object, namespace: str, owner: Object) -> Object:
        """Have an object be as it is here, in these fields. Raises as `ask` does, and Wrong if it is another's."""
        api, kind, metadata = made["apiVersion"], made["kind"], made["metadata"]
        path = place(api, kind, namespace, metadata["name"])
        if (there := await self.ask("GET", path)) and not owns(owner, there):
            raise InvalidSpec(
                "NameTaken", f"{kind} {metadata['name']} is there already, and not of this {owner['kind']}"
            )
        whole = made | {"metadata": metadata | {"namespace": namespace, "ownerReferences": [owner]}}
        if (applied := await self.ask("PATCH", f"{path}?{APPLIED}", whole, APPLY)) is None:
            raise InvalidSpec("KindUnknown", f"the cluster has no {kind} of {api}")
        return applied

    async def delete(self, api: str, kind: str, namespace: str, name: str, owner: Object) -> None:
        """Delete an object if it is there and has this owner."""
        path = place(api, kind, namespace, name)
        if (there := await self.ask("GET", path)) and owns(owner, there):
            await self.ask("DELETE", path)


def owns(owner: Object, body: Object) -> bool:
    """Whether this is one of an object's owners."""
    return owner["uid"] in {one["uid"] for one in body["metadata"].get("ownerReferences", [])}


def place(api: str, kind: str, namespace: str, name: str = "") -> str:
    """The path of an object, or of all of a kind."""
    plural = f"{kind.lower()[:-1]}ies" if kind.endswith("y") else f"{kind.lower()}s"
    return "/".join(("/apis" if "/" in api else "/api", api, "namespaces", namespace, plural, *filter(None, [name])))
