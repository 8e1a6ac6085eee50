"""`python -m jaxpar` is the command `jaxpar`."""

from .cli import main

if __name__ == "__main__":
    main()
