"""The face of transformers 4 around a call: methods of a model, streamers."""
