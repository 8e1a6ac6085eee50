"""The layout of a training state: mesh, precision, the stored form of parameters, bytes per device."""
