"""transformers models behind the Model interface; the only package that imports transformers."""
