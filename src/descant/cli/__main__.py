"""`python -m descant.cli`: the command line where its script is not on the path."""

from descant.cli import main

main()
