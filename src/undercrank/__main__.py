"""`python -m undercrank`: the command, where no script of that name is on the path."""

from undercrank.cli import console

console()
