"""What users build on is as it was when they began."""

from __future__ import annotations

from tools.docs import public_face


def test_the_public_names_and_their_signatures_are_those_of_the_file():
    """Where a change is meant, `python tools/docs/public_face.py` writes the file again."""
    assert list(public_face.lines()) == public_face.FACE.read_text("utf-8").splitlines()
