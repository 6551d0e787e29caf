"""An OpenAI-compatible server in which every decoding method is a field of the request."""
