"""The user's side of a step: models of any library as a `Model`, and batches."""
