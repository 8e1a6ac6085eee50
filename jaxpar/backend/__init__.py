"""What has to be right before JAX starts, and what every room uses: compiler flags, caches, files, text."""
