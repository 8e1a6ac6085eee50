"""The ground floor: setup that has to precede JAX's start, and helpers that every room uses.

quiet, cpu_compiler          before JAX starts: filtered start-up messages, compiler flags
compile_cache, machines      JAX's compilation cache; the hosts of devices
files, buckets, packages     paths on disk and in buckets; optional packages
text, moved, removed         text for people; older names and their replacements
"""
