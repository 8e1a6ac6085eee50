"""`python -m jaxpar` is the command `jaxpar`."""

from .cli.commands import main

if __name__ == "__main__":
    main()
