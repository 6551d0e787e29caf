"""The engine behind a server: a thread that steps a session, its queue of events, its metrics."""
