"""The documented transformers cache classes, each over one of the KV stores."""
