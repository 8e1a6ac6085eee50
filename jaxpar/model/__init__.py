"""What a user hands over: a model of any kind as a `Model`, and its batches."""
