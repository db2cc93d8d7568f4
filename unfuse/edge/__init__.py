"""The edge of the server: connections, allowed hosts and origins, API keys, limits."""
