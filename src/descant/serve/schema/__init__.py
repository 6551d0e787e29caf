"""The bodies of requests, in OpenAI's schema with every generation parameter beside it."""
