"""`python -m manyheads` is the command line."""

from manyheads.cli import main

if __name__ == "__main__":
    main()
