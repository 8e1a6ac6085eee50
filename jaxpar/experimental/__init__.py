"""What is there to be measured and learnt from. Names here may change without notice."""
