"""Sets up JAX's persistent compilation cache for GPUs and TPUs, in a folder of each host.

A resumed run then compiles nothing (https://docs.jax.dev/en/latest/persistent_compilation_cache.html). On CPUs the
cache stays off: with jax 0.10.2, cached programs with collectives can abort or hang.

A cached program is code that runs, so the folder must be writable by this user only (`secure`). On each host one
process writes (`_write`).
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
from jax._src import compilation_cache, compiler  # JAX has no public API to choose the process that writes

from .files import user_cache
from .machines import host_of, is_away

_ALTERNATIVES = (
    "JAX_COMPILATION_CACHE_DIR=/a/folder names another folder, and JAX_ENABLE_COMPILATION_CACHE=false caches nothing"
)


def folder() -> Path:
    """Return this host's cache folder."""
    return user_cache("compiled", socket.gethostname())


def keep_compiled(first_device: Any) -> None:
    """Switch the compilation cache on for this process, unless the user has set a folder or switched it off.

    Every program is cached, however quickly it compiles. If the folder cannot be used, a warning says why. Nothing
    happens unless the first device of the mesh is a GPU or TPU that programs can run on.
    """
    config: Any = jax.config
    if first_device.platform not in ("gpu", "tpu") or is_away(first_device):
        return
    if config.jax_compilation_cache_dir is not None or not config.jax_enable_compilation_cache:
        return
    cache_folder = folder()
    try:
        if exposure := secure(cache_folder):
            warnings.warn(f"{exposure}: the programs in it are removed, and compiled again", stacklevel=4)
    except OSError as error:
        path = error.filename or cache_folder
        warnings.warn(f"{path}: {error.strerror}; compiled programs are not cached. {_ALTERNATIVES}", stacklevel=4)
        return
    config.update("jax_compilation_cache_dir", str(cache_folder))
    # JAX's default caches only programs that took a second or more to compile.
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # The first process of each host writes; for process 0, JAX's own function does.
    host_writer = min(d.process_index for d in jax.devices() if host_of(d) == host_of(jax.local_devices()[0]))
    if jax.process_index() == host_writer > 0:
        compiler._cache_write = _write


def secure(cache_folder: Path) -> str:
    """Create a folder that only this user can write to, or make an existing one so.

    Another user who can write to the cache could make this user's processes run any program. The same holds for the two
    folders above it, in which the cache could be replaced; they lose the permissions of others too. If others could
    write to the cache itself, its contents are removed.

    Returns:
      A sentence that others could write to the cache; "" if they could not.

    Raises:
      OSError: one of the three folders belongs to another user, or its permissions cannot be changed.
    """
    write_by_others = stat.S_IWGRP | stat.S_IWOTH
    for path in (cache_folder.parent.parent, cache_folder.parent, cache_folder):
        # `mkdir` does nothing for an existing folder, and the umask may take bits away: the permissions are set below.
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Check a link and its target: whoever owns the link can make it point elsewhere.
        link_status, status = path.lstat(), path.stat()
        for owner in (link_status.st_uid, status.st_uid):
            if owner != os.geteuid():
                raise PermissionError(errno.EPERM, f"it belongs to another user, {owner}", str(path))
        if path != cache_folder and status.st_mode & write_by_others:
            path.chmod(stat.S_IMODE(status.st_mode) & ~write_by_others)
    # `status` is that of the last of the three folders, the cache itself.
    if not status.st_mode & write_by_others:
        cache_folder.chmod(0o700)
        return ""
    if cache_folder.is_symlink():
        raise PermissionError(
            errno.EPERM, f"others can write to {cache_folder.resolve()}, to which it is a link", str(cache_folder)
        )
    # Move the contents away at once: another process must never find a folder that is secure but not yet empty.
    discarded = cache_folder.with_name(f".{cache_folder.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):  # another process of this user has moved it
        cache_folder.rename(discarded)
    cache_folder.mkdir(exist_ok=True, mode=0o700)
    shutil.rmtree(discarded, ignore_errors=True)
    return f"others could write to {cache_folder} (mode {stat.S_IMODE(status.st_mode):o})"


def _write(
    key: str, seconds: float, module: str, backend: Any, executable: Any, host_callbacks: Sequence[Any] = ()
) -> None:
    """Write a program to the cache; replaces JAX's `_cache_write` on hosts other than that of process 0.

    JAX's function lets only process 0 write, for folders that all hosts share. Here each host has its own folder, and
    would compile everything again while process 0 waits. jax before 0.12 passes host callbacks, with which a program
    cannot be cached.
    """
    config: Any = jax.config
    if host_callbacks or seconds < config.jax_persistent_cache_min_compile_time_secs:
        return
    try:
        compilation_cache.put_executable_and_time(key, module, executable, backend, int(seconds))
    except Exception as error:  # as in JAX's function: the disk is full, or the executable cannot be serialized
        warnings.warn(f"the compiled program {module} is not cached: {error}. {_ALTERNATIVES}", stacklevel=2)
