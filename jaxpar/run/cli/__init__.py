"""The command `jaxpar`."""

from .commands import main as main
