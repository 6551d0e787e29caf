"""The sentences of transformers' documentation, each with a check that runs on Descant and on 4.52.4."""
