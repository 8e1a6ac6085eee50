"""`jaxpar.targets` by the name that it had while it stood here: programs of users import it."""

from ..targets import *  # noqa: F403
