"""From a request to tokens: planner, admission, running requests, the step, and `Session`."""
