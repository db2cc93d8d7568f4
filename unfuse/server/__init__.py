"""The gateway: models and requests over HTTP, in OpenAI's shape."""
