"""What proves that a version can be published; RELEASING.md runs each of these commands."""
