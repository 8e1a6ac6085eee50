"""Where model, strategy and layout meet: local gradients, the update, the first state, the step."""
