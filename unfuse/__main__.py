"""`python -m unfuse` is the command `unfuse`."""

from unfuse.cli.main import main

main()
