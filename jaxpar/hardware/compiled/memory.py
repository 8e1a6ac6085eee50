"""The memory of a device that a compiled program takes."""

from typing import Any

import jax


def program_memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Return bytes per device of "arguments", "outputs", "temporaries", and their "total".

    Memory of an argument that an output reuses (donation) counts once in the total.
    """
    stats: Any = compiled.memory_analysis()
    parts = {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
    }
    return parts | {"total": sum(parts.values()) - stats.alias_size_in_bytes}
