"""The HTTP gateway: routes for models and requests, in the formats of OpenAI's API."""
