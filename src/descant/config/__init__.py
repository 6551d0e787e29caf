"""Generation parameters: `GenerationConfig`, its fields, their validation, and the Hub client."""
