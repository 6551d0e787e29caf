"""Tables of rows, the requests that run in them, and how requests come and go."""
