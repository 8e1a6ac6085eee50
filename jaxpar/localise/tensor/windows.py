"""Nothing: all follow from factors."""
