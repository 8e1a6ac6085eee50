"""Where every leaf lives: mesh, precision, how parameters are stored, bytes per device."""
