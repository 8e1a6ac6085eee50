"""Accelerators to compile for without having them, and their memory, peaks and bandwidths with sources."""

from .devices import Target as Target
from .devices import gpu_topology as gpu_topology
from .devices import missing_compiler as missing_compiler
from .devices import target as target
from .hardware import KINDS as KINDS
from .hardware import Hardware as Hardware
from .kinds import capture as capture
from .kinds import load as load
from .kinds import to_toml as to_toml
