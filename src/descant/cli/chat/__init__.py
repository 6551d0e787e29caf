"""`descant chat`: a conversation with a model."""
