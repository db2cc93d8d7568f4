"""A small asynchronous client of the Kubernetes API server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import httpx2

from unfuse.core.errors import TransientError
from unfuse.k8s.spec import InvalidSpec, Object

if TYPE_CHECKING:
    from kopf import ConnectionInfo

#: Query of a server-side apply.
APPLIED = "fieldManager=unfuse-operator&force=true"

#: Content types of a server-side apply and of a merge patch.
APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"


class ClusterClient:
    """A client of the API server.

    login: returns the address and the credentials. It is called again after the server refused them.
    """

    def __init__(self, login: Callable[[], ConnectionInfo]) -> None:
        self._login = login
        self._client: httpx2.AsyncClient | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._client:
            await self._client.aclose()
        self._client = None

    async def call(
        self, method: str, path: str, body: object = None, content_type: str = "application/json"
    ) -> Object | None:
        """Send one request. Returns the answer, or None for status 404.

        Raises InvalidSpec if the server refuses the request, and TransientError if it cannot be reached or has an
        error. Status 500 for a write counts as a refusal, since an admission webhook that does not answer causes it.

        body: the JSON content, or None. content_type: the content type of `body`.
        """
        if self._client is None:
            connection = self._login()
            self._client = httpx2.AsyncClient(
                base_url=connection.server,
                headers=connection.as_http_headers(),
                verify=connection.as_ssl_context(),
                trust_env=False,
            )
        content = None if body is None else json.dumps(body)
        try:
            response = await self._client.request(method, path, content=content, headers={"content-type": content_type})
            # The 404 of an API that the cluster lacks is text.
            answer = {} if response.status_code == 404 else response.json()
        except (httpx2.HTTPError, ValueError) as error:
            raise TransientError(f"the API server does not answer: {error!r}") from error

        # The next call logs in again, since the token may have expired.
        if response.status_code == 401:
            await self.close()
        if response.status_code in {401, 429} or response.status_code >= (500 if method == "GET" else 501):
            raise TransientError(f"the API server answered {response.status_code}: {answer.get('message')}")
        if response.is_error and response.status_code != 404:
            raise InvalidSpec(answer.get("reason") or "Refused", str(answer.get("message")))
        return None if response.status_code == 404 else dict(answer)

    async def every(self, api: str, kind: str, namespace: str, query: str = "") -> dict[str, Object]:
        """Return all objects of a kind in a namespace, by name.

        Raises as `call` does.
        """
        answer = await self.call("GET", object_path(api, kind, namespace) + query) or {}
        return {item["metadata"]["name"]: item for item in answer.get("items", [])}

    async def create(self, body: Object, namespace: str, owner: Object) -> None:
        """Create an object with this owner, unless one of its name exists.

        Raises as `call` does.
        """
        owned = body | {"metadata": body["metadata"] | {"ownerReferences": [owner]}}
        try:
            await self.call("POST", object_path(body["apiVersion"], body["kind"], namespace), owned)
        except InvalidSpec as error:
            if error.reason != "AlreadyExists":
                raise

    async def apply(self, body: Object, namespace: str, owner: Object) -> Object:
        """Create or update an object by server-side apply, and return the stored object.

        Raises as `call` does, and InvalidSpec if an object of its name has another owner, or the kind is unknown.
        """
        api = body["apiVersion"]
        kind = body["kind"]
        metadata = body["metadata"]
        path = object_path(api, kind, namespace, metadata["name"])
        # A forced server-side apply would take over an object of somebody else.
        if (existing := await self.call("GET", path)) and not owns(owner, existing):
            raise InvalidSpec(
                "NameTaken", f"{kind} {metadata['name']} already exists and does not belong to this {owner['kind']}"
            )
        owned = body | {"metadata": metadata | {"namespace": namespace, "ownerReferences": [owner]}}
        if (applied := await self.call("PATCH", f"{path}?{APPLIED}", owned, APPLY)) is None:
            raise InvalidSpec("KindUnknown", f"the cluster does not have the kind {kind} of {api}")
        return applied

    async def delete(self, api: str, kind: str, namespace: str, name: str, owner: Object) -> None:
        """Delete an object if it exists and has this owner."""
        path = object_path(api, kind, namespace, name)
        if (existing := await self.call("GET", path)) and owns(owner, existing):
            await self.call("DELETE", path)


def owns(owner: Object, body: Object) -> bool:
    """Return whether the object has this owner."""
    return owner["uid"] in {reference["uid"] for reference in body["metadata"].get("ownerReferences", [])}


def object_path(api: str, kind: str, namespace: str, name: str = "") -> str:
    """Return the API path of an object; without a name, of its kind."""
    plural = f"{kind.lower()[:-1]}ies" if kind.endswith("y") else f"{kind.lower()}s"
    return "/".join(("/apis" if "/" in api else "/api", api, "namespaces", namespace, plural, *filter(None, [name])))
