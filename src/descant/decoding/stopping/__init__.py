"""Stop conditions: the checker that ends rows, and the documented `StoppingCriteria`."""
