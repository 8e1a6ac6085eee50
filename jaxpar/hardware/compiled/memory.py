"""What a compiled program takes of a device's memory."""

from typing import Any

import jax


def program_memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes of a device: arguments, outputs, temporaries, and their total, in which memory that an output takes over
    from an argument counts once.
    """
    found: Any = compiled.memory_analysis()
    parts = {
        "arguments": found.argument_size_in_bytes,
        "outputs": found.output_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
    }
    return parts | {"total": sum(parts.values()) - found.alias_size_in_bytes}
