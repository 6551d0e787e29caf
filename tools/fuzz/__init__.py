"""The differential fuzz: random requests on tiny random models, each decoded in several ways that must agree."""
