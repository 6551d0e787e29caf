"""The scheduler: which requests run in a step, by budgets, priorities and age; host code without tensors."""
