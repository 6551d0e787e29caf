"""`descant doctor`: one report on a machine, its fast paths, the laws, parity with transformers and times."""
