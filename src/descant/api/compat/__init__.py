"""The faces of others: methods of a model and streamers as in transformers 4, a backend of lm-eval."""
