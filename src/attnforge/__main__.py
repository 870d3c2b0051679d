"""`python -m attnforge` is the command `attnforge`."""

from .cli import main

main()
