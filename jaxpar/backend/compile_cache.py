"""Programs for GPUs and TPUs are compiled once: JAX's persistent compilation cache, in a folder of each host.

A resumed run then compiles nothing (https://docs.jax.dev/en/latest/persistent_compilation_cache.html). On CPUs it stays
off: of jax 0.10.2, programs with collectives that come from it can abort or hang.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import stat
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache, compiler  # of who writes, JAX's public API knows nothing

from .machines import host_of

_OFF = "JAX_COMPILATION_CACHE_DIR=/a/folder names another, and JAX_ENABLE_COMPILATION_CACHE=false keeps nothing"


def folder() -> Path:
    """This host's, in the user's folder for caches, which hosts may share; see `secure`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxpar" / "compiled" / socket.gethostname()


def keep_compiled(first: Any) -> None:
    """From now on, what is compiled is kept, however little time it took, and found again: where the `first` device of
    a mesh is a GPU or TPU that is there, and where the user has not set a folder or switched the cache off.
    """
    config: Any = jax.config
    absent = type(first.client).__name__ == "CompileOnlyPyClient"
    if first.platform not in ("gpu", "tpu") or absent or config.jax_compilation_cache_dir is not None:
        return
    if not config.jax_enable_compilation_cache:
        return
    place = folder()
    try:
        if untrusted := secure(place):
            warnings.warn(f"{untrusted}: what was kept there is removed, and compiled again", stacklevel=4)
    except OSError as error:
        where = error.filename or place
        warnings.warn(f"{where}: {error.strerror}; what is compiled is not kept. {_OFF}", stacklevel=4)
        return
    config.update("jax_compilation_cache_dir", str(place))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    mine = min(d.process_index for d in jax.devices() if host_of(d) == host_of(jax.local_devices()[0]))
    if jax.process_index() == mine > 0:
        compiler._cache_write = _write


def secure(place: Path) -> str:
    """Make the folder one to which this user's processes alone can write, whether it exists already or not: who can
    write there can have them run what they like.

    The two folders above it are made so too, since who can write there can put another in its place. Where others could
    write to `place` itself, what they may have left there is removed.

    Returns that others could, or "". Raises OSError where one of the three is another user's, or cannot be changed.
    """
    for part in (place.parent.parent, place.parent, place):
        part.mkdir(parents=True, exist_ok=True, mode=0o700)
        link, about = part.lstat(), part.stat()
        for owner in (link.st_uid, about.st_uid):
            if owner != os.geteuid():
                raise PermissionError(errno.EPERM, f"it belongs to another user, {owner}", str(part))
        others = stat.S_IWGRP | stat.S_IWOTH
        if part != place and about.st_mode & others:
            part.chmod(stat.S_IMODE(about.st_mode) & ~others)
    if not about.st_mode & others:
        place.chmod(0o700)
        return ""
    if place.is_symlink():
        raise PermissionError(errno.EPERM, f"others can write to {place.resolve()}, to which it is a link", str(place))
    # In one go, so that no other process finds a folder that is closed and not empty yet.
    aside = place.with_name(f".{place.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):  # another process of this user is faster
        place.rename(aside)
    place.mkdir(exist_ok=True, mode=0o700)
    shutil.rmtree(aside, ignore_errors=True)
    return f"others could write to {place} (mode {stat.S_IMODE(about.st_mode):o})"


def _write(
    key: str, seconds: float, module: str, backend: Any, executable: Any, host_callbacks: Sequence[Any] = ()
) -> None:
    """JAX's own lets process 0 write alone, for folders that all hosts share: on every other host all would be compiled
    again, and process 0 wait for it. From 0.12 on jax says nothing of host callbacks, with which older ones keep none.
    """
    config: Any = jax.config
    if host_callbacks or seconds < config.jax_persistent_cache_min_compile_time_secs:
        return
    try:
        compilation_cache.put_executable_and_time(key, module, executable, backend, int(seconds))
    except Exception as error:  # as JAX's own: of a disk, or of an executable that cannot be written
        warnings.warn(f"what is compiled of {module} is not kept: {error}. {_OFF}", stacklevel=2)
