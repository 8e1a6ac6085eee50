"""`python -m jaxpar` is the command `jaxpar`."""

from .run.cli.commands import main

if __name__ == "__main__":
    main()
