"""The gateway: models and requests over HTTP, in OpenAI's shape."""

from unfuse.server.app import create_app as create_app

__all__ = ["create_app"]
