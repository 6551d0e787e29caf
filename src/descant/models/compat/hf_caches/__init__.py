"""The caches of the transformers API over stores."""
