"""The differential fuzz: random requests, each decoded in several ways that must agree."""
